"""The gate: the one place where requests are checked against keys and limits, and counted."""

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from c2cserve.runtime.gateway import Gateway, ModelFiles, Refused
from c2cserve.server.access.keyfile import KeysFileError, read_keys
from c2cserve.server.access.keyring import Denied, Key, Keyring
from c2cserve.server.access.quota import Exceeded
from c2cserve.server.access.usage import UsageTotals, Used, model_name, used_by
from c2cserve.server.access.usage_log import UsageLine, UsageLog
from c2cserve.server.errors import ApiError

if TYPE_CHECKING:
    from c2cserve.server.choices import ChoiceStream
    from c2cserve.server.prepare import Prepared

log = logging.getLogger(__name__)


class Gate:
    """Identifies callers, and applies the limits of their keys. Used on the server's event loop."""

    def __init__(
        self, api_keys: Sequence[str] = (), keys_file: Path | None = None,
        usage_log: Path | None = None,
    ) -> None:  # fmt: skip
        """Raises ValueError (KeysFileError among them) for keys that cannot be used, OSError for a
        usage log that cannot be written."""
        self.keyring = Keyring(api_keys, from_file=keys_file is not None)
        self.usage = UsageTotals()
        self.reloads = {"ok": 0, "failed": 0}
        """Outcome -> how often the keys file was read again with it."""
        self.broken = ""
        """Why the last read of the keys file failed, else empty. The keys read before stay in
        force."""
        self._keys_file = keys_file
        self._loaded = datetime.now(UTC)
        self._reloading = asyncio.Lock()
        if keys_file is not None:
            self.keyring.replace(read_keys(keys_file).keys)
        self.log = None if usage_log is None else UsageLog(usage_log)

    def close(self) -> None:
        if self.log is not None:
            self.log.close()

    # ---- requests -------------------------------------------------------------------------------

    def identify(self, authorization: str | None) -> Key:
        """Return the key of a request. Raises ApiError (401)."""
        found = self.keyring.find(authorization)
        if isinstance(found, Denied):
            headers = {"www-authenticate": "Bearer"}
            raise ApiError(401, found.message, code=found.code, headers=headers)
        return found

    def arrive(self, key: Key, request_id: str) -> "Lease":
        """Count a request before any work is done for it. Raises ApiError (429)."""
        exceeded = key.quota.arrive(time.monotonic())
        if exceeded is not None:
            raise self.exceeded(key, exceeded)
        return Lease(self, key, request_id)

    def find_model(self, key: Key, name: str, gateway: Gateway) -> ModelFiles | None:
        """Return the model that has this id or alias, None if there is none. Raises ApiError (403)
        if the key may not use it, else as `Gateway.resolve` does."""
        try:
            files = gateway.resolve(name)
        except Refused:
            self.check_model(key, name, name)
            raise
        if files is not None:
            self.check_model(key, files.id, name)
        return files

    def check_model(self, key: Key, id_: str, name: str) -> None:
        """Check that the key may use the model, which the request calls `name`. Raises ApiError
        (403)."""
        if not key.quota.limits.allows_model(id_):
            message = f"The API key {key.name!r} may not use the model {name[:200]!r}"
            raise self.forbidden(key, "models", message, "model", "model_not_allowed")

    def forbidden(self, key: Key, limit: str, message: str, param: str, code: str) -> ApiError:
        """Count a refusal, and return it as a 403."""
        self.usage.refused[key.name, limit] += 1
        return ApiError(403, message, param=param, code=code)

    def exceeded(self, key: Key, exceeded: Exceeded, param: str = "") -> ApiError:
        """Count a refusal, and return it: a 429, or a 400 that names `param` if waiting cannot
        help."""
        limit, allowed, asked = exceeded.limit, exceeded.allowed, exceeded.asked
        self.usage.refused[key.name, limit] += 1
        if exceeded.wait_s == math.inf:
            message = (
                f"the request asks for {asked} of {limit}; the limit of the API key "
                f"{key.name!r} is {allowed}"
            )
            return ApiError(400, message, param=param, code="limit_exceeded")
        message = (
            f"Rate limit reached for the API key {key.name!r} on {limit}: the limit is {allowed}. "
            f"Please try again in {exceeded.wait_s:.3g} s."
        )
        return ApiError(
            429, message, param=limit, code="rate_limit_exceeded", retry_after_s=exceeded.wait_s
        )

    # ---- the keys file --------------------------------------------------------------------------

    async def reload(self) -> int:
        """Read the keys file again, and use its keys from now on. Requests in flight go on. Return
        the number of keys.

        Raises ApiError (400) for a file that cannot be used: the keys read before stay in force.
        Raises ApiError (409) if the server has no keys file.
        """
        path = self._keys_file
        if path is None:
            raise ApiError(409, "this server has no keys file (--keys)")
        async with self._reloading:
            try:
                records = (await asyncio.to_thread(read_keys, path)).keys
            except KeysFileError as error:
                self.reloads["failed"] += 1
                self.broken = str(error)
                log.error("%s; the keys of before stay in force", error)
                raise ApiError(400, f"{error}; the keys of before stay in force") from error
            self.keyring.replace(records)
            self.reloads["ok"] += 1
            self.broken, self._loaded = "", datetime.now(UTC)
            log.info("%s: %d keys", path, len(records))
            return len(records)

    async def hang_up(self) -> None:
        """Handle SIGHUP: read the keys file again, and open the usage log again. Errors are
        logged."""
        if self.log is not None:
            self.log.reopen()
        if self._keys_file is not None:
            try:
                await self.reload()
            except ApiError:
                return  # `reload` has logged it

    # ---- what operators see ---------------------------------------------------------------------

    def listing(self) -> dict[str, object]:
        """Return the keys without their hashes."""
        now = datetime.now(UTC)
        return {
            "file": None if self._keys_file is None else str(self._keys_file),
            "loaded": None if self._keys_file is None else self._loaded,
            "error": self.broken or None,
            "keys": [_shown(key, now) for key in self.keyring.present()],
        }

    def report(self) -> dict[str, object]:
        lost = 0 if self.log is None else self.log.lost
        return {**self.usage.report(), "lines_lost": lost}


class Lease:
    """The places and tokens of its key that one request holds, from its arrival to its end."""

    def __init__(self, gate: Gate, key: Key, request_id: str) -> None:
        self.key = key
        self._gate = gate
        self._request_id = request_id
        self._places = 1
        self._prompt_tokens = 0
        self._output_tokens = 0
        """Output tokens charged so far."""

    def admit(self, prepared: "Prepared", headers: Mapping[str, str], param: str) -> None:
        """Take a place for each choice, and charge the tokens of the prompts. Called again when the
        request is prepared again. `param`: the field with the prompts. Raises ApiError: 403, 429,
        or 400 for a request that is larger than a limit."""
        self._check_wishes(prepared, headers)
        key, now = self.key, time.monotonic()
        tokens, choices = sum(len(one.tokens) for one in prepared.prompts), len(prepared.jobs)
        exceeded = key.quota.admit(self._places, choices, tokens, now)
        if exceeded is not None:
            field = "n" if exceeded.limit == "concurrency" else param
            raise self._gate.exceeded(key, exceeded, field)
        self._places, self._prompt_tokens, self._output_tokens = choices, tokens, 0

    def produced(self, tokens: int) -> None:
        """Charge output as it is produced. `tokens`: new tokens of any choice."""
        self._output_tokens += tokens
        self.key.quota.charge(tokens, time.monotonic())

    def close(self, prepared: "Prepared", choices: Sequence["ChoiceStream"]) -> None:
        """Count what the ended choices have used, and give back what they hold."""
        used = used_by(prepared, choices)
        self.produced(used.output_tokens - self._output_tokens)
        self.key.quota.give_back(self._prompt_tokens - used.prompt_tokens, time.monotonic())
        self._prompt_tokens = 0
        self.end()
        if used.requests:
            model = model_name(prepared)
            self._gate.usage.add(self.key.name, self.key.tenant, model, used)
            self._log(model, used, choices)

    def end(self) -> None:
        """Give the places back. A second call does nothing."""
        self.key.quota.leave(self._places)
        self._places = 0

    def _log(self, model: str, used: Used, choices: Sequence["ChoiceStream"]) -> None:
        if self._gate.log is None:
            return
        finish: dict[str, int] = {}
        for choice in choices:
            finish[choice.finish] = finish.get(choice.finish, 0) + 1
        line = UsageLine(
            datetime.now(UTC), self._request_id, self.key.name, self.key.tenant, model,
            len(choices), used.prompt_tokens, used.cached_tokens, used.output_tokens, finish,
        )  # fmt: skip
        self._gate.log.write(line)

    def _check_wishes(self, prepared: "Prepared", headers: Mapping[str, str]) -> None:
        """Check the priority and the latency targets that a request asks for. The model's own ones
        are the operator's choice, and pass. Raises ApiError (403)."""
        limits, asked, slo = self.key.quota.limits, prepared.asked, prepared.jobs[0].request.slo
        highest = limits.max_priority
        if highest is not None and asked.priority is not None and asked.priority > highest:
            message = f"priority: the API key {self.key.name!r} may ask for at most {highest}"
            raise self._gate.forbidden(
                self.key, "max_priority", message, "priority", "priority_not_allowed"
            )
        for limit, header, wanted_s, tightest_ms in (
            ("min_ttft_ms", "x-slo-ttft-ms", slo.ttft_s, limits.min_ttft_ms),
            ("min_tpot_ms", "x-slo-tpot-ms", slo.tpot_s, limits.min_tpot_ms),
        ):
            if tightest_ms is not None and header in headers and wanted_s * 1e3 < tightest_ms:
                message = (
                    f"{header}: the API key {self.key.name!r} may ask for at least "
                    f"{tightest_ms:g} ms"
                )
                raise self._gate.forbidden(self.key, limit, message, header, "slo_not_allowed")


def rate_headers(key: Key) -> dict[str, str]:
    """Return OpenAI's `x-ratelimit-` headers for the limits that the key has."""
    headers: dict[str, str] = {}
    for what, rate in key.quota.rates(time.monotonic()).items():
        headers[f"x-ratelimit-limit-{what}"] = str(rate.limit)
        headers[f"x-ratelimit-remaining-{what}"] = str(rate.remaining)
        headers[f"x-ratelimit-reset-{what}"] = show_duration(rate.full_in_s)
    return headers


def show_duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it: `0s`, `17ms`, `8.64s`, `6m0s`, `1h0m30s`."""
    milliseconds = math.ceil(seconds * 1e3 - 1e-6)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    head = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{head}{rest / 1e3:g}s"


def _shown(key: Key, now: datetime) -> dict[str, object]:
    record = key.record
    shown: dict[str, object] = {
        "name": key.name, "tenant": key.tenant, "running": key.quota.running,
        "source": "option" if record is None else "file",
        "state": "active" if record is None else record.state(now),
        "limits": msgspec.to_builtins(key.quota.limits),
        "remaining": {
            f"{what}_per_minute": rate.remaining
            for what, rate in key.quota.rates(time.monotonic()).items()
        },
    }  # fmt: skip
    if record is not None:
        shown |= {
            "id": record.id, "created": record.created, "expires": record.expires,
            "revoked": record.revoked, "cache_group": record.cache_group,
        }  # fmt: skip
    return shown
