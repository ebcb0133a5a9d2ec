"""Counting and showing tokens, in a text process. /tokenize and /detokenize have vLLM's shapes."""

import msgspec
from pydantic import ValidationError

from c2cserve.server.doors.anthropic.fields import read_count
from c2cserve.server.errors import ApiError, of_validation
from c2cserve.server.fields import ChatBody, DetokenizeBody, TokenizeBody
from c2cserve.server.text.limits import check_vocabulary, check_vocabulary_ids, within
from c2cserve.server.text.messages import TextAnswer, TextRequest
from c2cserve.server.text.tokenizer import Tokenizer
from c2cserve.server.text.vocabulary import TokenizerError


def do_tokenize(work: TextRequest, tokenizer: Tokenizer | None) -> TextAnswer:
    """Answer a request to /tokenize. Without a tokenizer, the body is only validated. Raises
    ApiError."""
    try:
        body = TokenizeBody.model_validate_json(work.body)
    except ValidationError as error:
        raise of_validation(error) from error
    tokens = _checked_tokens(body, work, tokenizer)
    if tokens is None or work.target is None or tokenizer is None:
        return TextAnswer(body.model, b"")
    content = {
        "count": len(tokens), "max_model_len": work.target.max_context, "tokens": tokens,
        "token_strs": tokenizer.pieces(tokens) if body.return_token_strs else None,
    }  # fmt: skip
    return TextAnswer(body.model, msgspec.json.encode(content))


def do_count(work: TextRequest, tokenizer: Tokenizer | None) -> TextAnswer:
    """Answer a request to /v1/messages/count_tokens. Raises ApiError."""
    asked = read_count(work.body)
    chat = asked.body
    assert isinstance(chat, ChatBody)
    body = TokenizeBody(
        model=chat.model, messages=chat.messages, chat_template_kwargs=chat.template_variables
    )
    tokens = _checked_tokens(body, work, tokenizer)
    content = b"" if tokens is None else msgspec.json.encode({"input_tokens": len(tokens)})
    return TextAnswer(body.model, content)


def _checked_tokens(
    body: TokenizeBody, work: TextRequest, tokenizer: Tokenizer | None
) -> list[int] | None:
    """Return the tokens of a body, within the limits; None without a tokenizer. Raises ApiError."""
    field, limits = "prompt" if body.messages is None else "messages", work.limits
    messages = body.messages or ()
    within(field, f"there are {len(messages)} messages", len(messages), limits.messages, "messages")
    chars = len(body.prompt or "") + sum(one.chars for one in messages)
    within(field, f"{field} has {chars} characters", chars, limits.prompt_chars, "prompt-chars")
    if work.target is None or tokenizer is None:
        return None
    try:
        tokens = _tokens(body, tokenizer, limits.prompt_chars)
    except TokenizerError as error:
        raise ApiError(400, str(error), param=field) from error
    check_vocabulary(tokens, work.target, field)
    return tokens


def _tokens(body: TokenizeBody, tokenizer: Tokenizer, chars_max: int) -> list[int]:
    special = body.add_special_tokens
    if body.messages is None:
        return tokenizer.encode(body.prompt or "", special=special is None or special)
    variables = dict(body.chat_template_kwargs or {})
    if body.tools:
        variables["tools"] = [tool.plain() for tool in body.tools]
    messages = [message.plain() for message in body.messages]
    prompted = body.add_generation_prompt is None or body.add_generation_prompt
    text = tokenizer.render(messages, variables, chars_max, prompted=prompted)
    return tokenizer.encode(text, special=bool(special))


def do_detokenize(work: TextRequest, tokenizer: Tokenizer | None) -> TextAnswer:
    """Answer a request to /detokenize. Without a tokenizer, the body is only validated. Raises
    ApiError."""
    try:
        body = DetokenizeBody.model_validate_json(work.body)
    except ValidationError as error:
        raise of_validation(error) from error
    count = len(body.tokens)
    limit = work.limits.prompt_tokens
    within("tokens", f"tokens has {count} entries", count, limit, "prompt-tokens")
    if work.target is None or tokenizer is None:
        return TextAnswer(body.model, b"")
    check_vocabulary_ids(body.tokens, work.target, "tokens")
    try:
        text = tokenizer.decode(body.tokens, special=True)
    except TokenizerError as error:
        raise ApiError(400, str(error), param="tokens") from error
    return TextAnswer(body.model, msgspec.json.encode({"prompt": text}))
