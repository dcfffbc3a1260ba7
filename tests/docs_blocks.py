"""The fenced blocks of the README and the docs: what each is, and how its commands are checked or run.

A block of shell commands runs as it stands, unless a comment in the line above says otherwise:
<!-- parse only: REASON -->     the real parsers take its commands and names; nothing runs
<!-- run with: VERB ARGUMENTS -->     lines of that verb get arguments that make them short
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mixlab.cli import build_parser
from mixlab.cli.arguments import changes_of, pairs
from mixlab.core.errors import MixlabError
from mixlab.dense.timm_maps import is_timm, timm_config
from mixlab.evals.cost.whole_task import is_whole_task
from mixlab.models.zoo import ensemble_row, list_models, model_config
from mixlab.training.recipe import load_recipe

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
FENCE = re.compile(
    r"^(?P<mark><!-- [^\n]* -->\n)?(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.M | re.S
)
SHELL, OUTPUT = ("sh", "bash"), ("text",)
# pages whose commands all take minutes, or what other pages make: their blocks need no marks
PARSED = {"bench.md": "minutes of measuring", "report.md": "folders of other verbs", "export.md": "a trained model"}
HARMLESS = {"cd", "export", "if", "fi", "curl", ".", "kill", "git"}  # nothing to check but the syntax
NAMING = ("train", "finetune", "transfer", "info")  # verbs that take the name of a model
OPERATORS = {"&&", "||", "|", ";", "&", "then", "else", "do"}


@dataclass(frozen=True)
class Block:
    page: str
    number: int
    language: str
    text: str
    parse_only: str = ""  # the reason
    run_with: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.page}-{self.number}"

    @property
    def is_shell(self) -> bool:
        return self.language in SHELL or (not self.language and self.text.startswith("mixlab "))


@cache
def blocks() -> tuple[Block, ...]:
    """Every block of every page. Raises at a mark that says nothing known."""
    found = []
    for page in PAGES:
        for number, match in enumerate(FENCE.finditer(page.read_text(encoding="utf-8"))):
            text = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.M)
            block = Block(page.name, number, match["language"], text, **read_mark(match["mark"] or ""))
            if block.is_shell and not block.parse_only and page.name in PARSED:
                block = Block(page.name, number, match["language"], text, PARSED[page.name])
            found.append(block)
    return tuple(found)


def read_mark(mark: str) -> dict[str, Any]:
    if reason := re.fullmatch(r"<!-- parse only: (.+) -->\n", mark):
        return {"parse_only": reason[1]}
    if arguments := re.fullmatch(r"<!-- run with: (.+) -->\n", mark):
        return {"run_with": tuple(shlex.split(arguments[1]))}
    if "parse only" in mark or "run with" in mark:
        raise ValueError(f"a mark without a reason or arguments: {mark}")
    return {}


# -- commands ------------------------------------------------------------------------------------


def lines_of(text: str) -> Iterator[tuple[str, str]]:
    """Each line of commands with the document that it reads (`<<'END'`), continued lines joined."""
    lines = iter(text.replace("\\\n", " ").splitlines())
    for line in lines:
        document = re.search(r"<<'(\w+)'", line)
        inside = []
        while document and (following := next(lines)) != document[1]:
            inside.append(following)
        if line.strip() and not line.lstrip().startswith("#"):
            yield line, "\n".join(inside)


def commands_of(line: str) -> Iterator[list[str]]:
    """The words of every command in a line, variables in front of it left out."""
    line = re.sub(r"\$\([^)]*\)", "VALUE", line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in (*lexer, ";"):
        if word in OPERATORS or word == ";":
            words = words[next((i for i, one in enumerate(words) if not re.match(r"[A-Z_]+=", one)), len(words)) :]
            if words:
                yield words
            words = []
        else:
            words.append(word)


def check(block: Block) -> int:
    """Every command of a shell block is one that exists, with names that exist. Gives their number."""
    done = subprocess.run(["bash", "-n", "-c", block.text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    checked = 0
    for line, document in lines_of(block.text):
        for words in commands_of(line):
            check_command(words, document)
            checked += 1
    return checked


def check_command(words: Sequence[str], document: str = "") -> None:
    program, *rest = words
    if program == "srun":
        return check_command(rest, document)
    if program in ("torchrun", "python", "python3") and "-m" in rest:
        module, *arguments = rest[rest.index("-m") + 1 :]
        return check_mixlab(arguments) if module == "mixlab" else None
    if program == "mixlab":
        return check_mixlab(rest)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(rest) <= set(targets), f"no such target: {rest}"
    elif program == "pip":
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = [extra for word in rest for found in re.findall(r"\[(.*)\]", word) for extra in found.split(",")]
        assert set(asked) <= set(known), f"no such extras: {asked}"
    elif program.startswith("python"):
        source = document if rest[0] == "-" else rest[1] if rest[0] == "-c" else (ROOT / rest[0]).read_text()
        compile(source, "documented", "exec")
    else:
        assert program in HARMLESS, f"a command that nothing checks: {' '.join(words)}"
    return None


@cache
def parser() -> Any:
    return build_parser()


def check_mixlab(words: Sequence[str]) -> None:
    """The parser takes it, and models, recipes and what is changed of them exist."""
    parsed = parser().parse_args(list(words))
    verb, arguments = parsed.verb, parsed[parsed.verb]
    named = [arguments.get("model", arguments.get("name"))] if verb in NAMING else []
    models = [name for name in named if name not in (None, "...")]
    for pattern in arguments.models if verb in ("compare", "bench") else ():
        name = pattern.partition(":")[2] if is_whole_task(pattern) else pattern
        assert list_models(name) or name.startswith("timm:"), f"no model is called {pattern}"
    for model in models:
        changed = pairs(arguments.get("model_set") or [], "--model-set")
        assert timm_config(model, changed) if is_timm(model) else ensemble_row(model) or model_config(model, **changed)
    recipes = arguments.get("recipe") or []
    for text in [recipes] if isinstance(recipes, str) else recipes:
        recipe = text.rpartition("=")[2]
        if not recipe.endswith(".toml"):
            changes = changes_of(arguments) if "set" in arguments else {}
            load_recipe(recipe, model=models[0] if models else "", changes=changes)


# -- running -------------------------------------------------------------------------------------


def run(block: Block, folder: Path) -> None:
    """Line by line in a folder. A server runs beside what follows it and ends with the block."""
    servers: list[subprocess.Popen[str]] = []
    port = "8000"
    try:
        for line, document in lines_of(block.text):
            verb = block.run_with[0] if block.run_with else ""
            if line.startswith(f"mixlab {verb} ") and verb:
                line = f"{re.sub('  #.*', '', line)} {shlex.join(block.run_with[1:])}"
            if line.startswith("mixlab serve"):
                server, port = start_server(line, folder)
                servers.append(server)
                continue
            shown = line.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace("curl ", "curl --fail -s ")
            done = execute(shown, folder, document)
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    finally:
        for server in servers:
            server.terminate()
            server.communicate(timeout=60)


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def execute(line: str, folder: Path, document: str = "") -> subprocess.CompletedProcess[str]:
    end = re.findall(r"<<'(\w+)'", line)
    text = "\n".join([line, document, *end]) if end else line
    return subprocess.run(["bash", "-e", "-c", text], cwd=folder, env=environment(), capture_output=True, text=True)


def start_server(line: str, folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Once it answers, at a port that is free."""
    words = [word for word in next(commands_of(line)) if word != "&"]
    server = subprocess.Popen(
        [*words, "--port", "0"],
        cwd=folder,
        env=environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert server.stderr is not None
    for told in server.stderr:
        if found := re.search(r"Serving .* at http://127\.0\.0\.1:(\d+)", told):
            return server, found[1]
    raise MixlabError(f"{line} ended with {server.wait()}")
