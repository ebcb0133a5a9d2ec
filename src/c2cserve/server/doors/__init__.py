"""Doors: the APIs in which one engine is asked. Each translates requests and answers, nothing else.

body --(text process)--> chat or completion --> pieces of output --> the API's own answer
     fields.py                                                       a `Writer`
"""
