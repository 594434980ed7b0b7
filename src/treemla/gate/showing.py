"""What every verb of the command line has in common: forms of its findings, paths that are tried, one exit code."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from treemla.gate.baseline import BrokenBaseline
from treemla.gate.exits import BaselineMissing, Exit, InvalidEnvironment
from treemla.gate.findings import Finding, Findings
from treemla.gate.outputs import expect_writable

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 # it has no public name
Made = Callable[[argparse.Namespace], Findings]
Writes = Callable[[argparse.Namespace], dict[str, Path]]
FORMS = {"json": "for programs", "junit": "as test cases", "md": "for a pull request"}
WRITTEN = {*FORMS, "html", "out", "picture"}  # the arguments that name an output


class Unusable(ValueError):
    """An argument or a file that a verb cannot work with: wrong usage."""


def add_verb(
    verbs: Verbs, name: str, made: Made, words: str, *, writes: Writes | None = None, tells: bool = False
) -> argparse.ArgumentParser:
    """A verb that ends with what `made` found. writes: {argument: file} beside the forms. tells: it prints its own
    tables, and only what is wrong is said again.
    """
    verb = verbs.add_parser(name, help=words)
    for form, text in FORMS.items():
        verb.add_argument(f"--{form}", type=Path, metavar="PATH", help=f"write the findings there, {text}")
    verb.set_defaults(run=lambda given: show(given, made, writes, tells=tells))
    return verb


def show(given: argparse.Namespace, made: Made, writes: Writes | None = None, *, tells: bool = False) -> Exit:
    """Run a verb. What keeps it from a verdict is a finding too: files that were asked for are always written.

    A path that cannot be written, or must not, is wrong usage before anything is done.
    """
    outputs = {f"--{form}": path for form in (*FORMS, "html") if (path := getattr(given, form, None)) is not None}
    try:
        expect_writable(outputs | (writes(given) if writes else {}), _inputs(given), _bases(given))
    except ValueError as error:
        print(f"{given.verb}: {Exit.USAGE.name}: {error}", file=sys.stderr)
        return Exit.USAGE
    try:
        findings = made(given)
    except (InvalidEnvironment, BaselineMissing, BrokenBaseline, Unusable) as error:
        exits = {InvalidEnvironment: Exit.INVALID_ENVIRONMENT, Unusable: Exit.USAGE}
        code = exits.get(type(error), Exit.BASELINE_MISSING)
        findings = Findings(given.verb, (Finding(given.verb, "no verdict", code, str(error)),))
    try:
        findings.write(given.json, given.junit, given.md)
        if "--html" in outputs:
            from treemla.gate import page

            page.write(outputs["--html"], findings, given.sources)
    except OSError as error:  # a disk that filled up meanwhile
        cause = Finding(given.verb, "not written", Exit.USAGE, f"what was asked for: {error}")
        findings = replace(findings, found=(*findings.found, cause))
    if not tells or findings.exit is not Exit.PASS:
        print(findings.problems() if tells else findings.text())
    return findings.exit


def _inputs(given: argparse.Namespace) -> list[Path]:
    """Every path among the arguments that is no output."""
    held = [value for name, value in vars(given).items() if name not in WRITTEN]
    return [
        path for value in held for path in (value if isinstance(value, list) else [value]) if isinstance(path, Path)
    ]


def _bases(given: argparse.Namespace) -> list[Path]:
    """Folders of trees to compare with, which are given as text since a commit may stand there."""
    held = [getattr(given, name, None) for name in ("base", "against")]
    return [Path(text) for text in held if isinstance(text, str) and Path(text).is_dir()]
