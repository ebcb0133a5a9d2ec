"""Dataflows and operators, their references and builds."""
