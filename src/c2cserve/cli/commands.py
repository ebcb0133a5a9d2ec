"""The commands of `c2cserve`. A command's module is imported when that command runs, so
`c2cserve --help` is immediate and one command's dependencies never burden another."""

import errno
import gc
import importlib
import inspect
import logging
import os
import sys
import traceback
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from c2cserve import __version__
from c2cserve.cli.main import INTERRUPTED
from c2cserve.terminal.output import CliError, CliErrors


@dataclass(frozen=True, slots=True)
class Lazy:
    """Where a command is: a function, or a `typer.Typer` with commands of its own."""

    module: str
    name: str
    help: str

    def load(self, command: str) -> Any:
        target = getattr(importlib.import_module(self.module), self.name)
        if not gc.isenabled():  # `main.app` has disabled it for the imports
            gc.freeze()
            gc.enable()
        if isinstance(target, typer.Typer):
            return _named(_unwrapped(typer.main.get_command(target)), command)
        single = typer.Typer(add_completion=False)
        single.command(command)(target)
        return _unwrapped(typer.main.get_command(single))


def _named(command: Any, name: str) -> Any:
    command.name = name
    return command


def _unwrapped(command: Any) -> Any:
    """Join the lines of each paragraph of the help: the terminal's width breaks them anew."""
    for one in (command, *getattr(command, "commands", {}).values()):
        paragraphs = inspect.cleandoc(one.help or "").split("\n\n")
        one.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return command


COMMANDS = {
    "serve": Lazy("c2cserve.cli.serve", "serve", "Serve a catalogue of models over HTTP."),
    "demo": Lazy("c2cserve.cli.demo", "demo", "Serve small built-in models and check answers."),
    "node": Lazy("c2cserve.serving.node.server", "node", "Run a node (started by its agent)."),
    "members": Lazy(
        "c2cserve.serving.front.members", "members", "Follow a cluster (started by a front)."
    ),
    "cluster": Lazy("c2cserve.cli.cluster", "app", "Show, drain and stop a cluster's nodes."),
    "models": Lazy("c2cserve.cli.models", "app", "List, add, remove and reload models."),
    "keys": Lazy("c2cserve.cli.keys", "app", "Make, list and revoke API keys; show their usage."),
    "top": Lazy("c2cserve.cli.top", "top", "Watch a server's slices and models."),
    "doctor": Lazy("c2cserve.cli.doctor", "doctor", "Check this machine and say what is used."),
    "kernels": Lazy("c2cserve.cli.kernels", "app", "Build, list, check and explain GPU kernels."),
    "multipath": Lazy("c2cserve.serving.multipath", "multipath", "Spread a program's copies."),
    "profile": Lazy(
        "c2cserve.cli.profile", "profile", "Measure this machine: links, memory, GEMMs."
    ),
    "bench": Lazy("c2cserve.cli.bench", "app", "Measure any OpenAI-compatible server."),
    "simulate": Lazy("c2cserve.cli.simulate", "simulate", "Simulate machines, models, traces."),
    "calibrate": Lazy(
        "c2cserve.cli.calibrate", "calibrate", "Make a simulator's profile out of a record."
    ),
    "plan": Lazy("c2cserve.cli.plan", "plan", "How many models fit; which machine is enough."),
    "replay": Lazy("c2cserve.cli.replay", "replay", "Reproduce a record's decisions."),
    "version": Lazy("c2cserve.cli.commands", "version", "Print the version."),
}


class LazyGroup(TyperGroup):
    """Lists commands by their one-line help and imports only the one that is invoked."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        lazy = COMMANDS.get(cmd_name)
        if lazy is None:
            return None
        if ctx.resilient_parsing:  # a shell asks what may follow the command
            return lazy.load(cmd_name)
        return TyperCommand(cmd_name, callback=None, help=lazy.help)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:  # typer would end with 130 and say nothing
            raise typer.Abort from error

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        self.commands = {name: self.get_command(ctx, name) for name in COMMANDS}
        name, _, rest = super().resolve_command(ctx, args)
        return name, COMMANDS[str(name)].load(str(name)), rest


commands = typer.Typer(
    name="c2cserve",
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@commands.callback()
def root(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_print_version, help="Print the version."
    ),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of a failure."),
) -> None:
    """A whole catalogue of LLMs in host memory, served by any compute slice."""


def version() -> None:
    """Print the version."""
    sys.stdout.write(f"c2cserve {__version__}\n")


_WHERE = "(c2cserve --debug shows where)"


def run(args: list[str]) -> int:
    """Run a command. Return 0 done, 1 failed, 2 wrong usage, 130 interrupted.

    A failure is one line on stderr; `--debug` (before the command) adds the traceback."""
    debug = "--debug" in args[:1]
    try:
        result = typer.main.get_command(commands).main(
            args=args, prog_name="c2cserve", standalone_mode=False
        )
    except CliErrors as errors:
        for message in errors.messages[:-1]:
            _report(message, errors.exit_code, debug=False)
        return _report(errors.messages[-1], errors.exit_code, debug=debug)
    except CliError as error:
        return _report(str(error), error.exit_code, debug=debug)
    except typer.TyperException as error:
        # An empty message is typer's "show the help", which it has printed.
        message = error.format_message()
        return _report(message, 2, debug=debug) if message else 2
    except (typer.Abort, KeyboardInterrupt):
        return _report("interrupted", INTERRUPTED, debug=debug)
    except BrokenPipeError:
        # The reader of our output (head, less) has ended.
        sys.stderr.close()
        return 1
    except OSError as error:
        if error.errno == errno.ENOSPC and error.filename is None:
            _discard_output()
            return _report(f"the output cannot be written: {error.strerror}", 1, debug=debug)
        what = f"{error.filename}: {error.strerror}" if error.filename else f"OSError: {error}"
        return _report(f"{what} {_WHERE}", 1, debug=debug)
    except Exception as error:  # noqa: BLE001 - the last stop: every failure is one clear line
        return _report(f"{type(error).__name__}: {error} {_WHERE}", 1, debug=debug)
    if result == INTERRUPTED:  # typer makes it of a KeyboardInterrupt, and says nothing
        return _report("interrupted", INTERRUPTED, debug=False)
    return result if isinstance(result, int) else 0


def _discard_output() -> None:
    """Let what is still buffered go nowhere: the interpreter would fail on it once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _report(message: str, code: int, *, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    for handler in logging.getLogger().handlers:
        handler.flush()  # what was logged comes before the last line
    line = " ".join(message.split())
    sys.stderr.write(f"c2cserve: {line}\n")
    return code
