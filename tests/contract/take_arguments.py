"""Have scripts parse arguments, and stop there; run as a program, in a process of its own.

Reads ``[[script, [argument, …]], …]`` as JSON and prints ``[{"options": [flag, …], "said": refusal}, …]``. A script is
run with these arguments up to its ``parse_args``; one without arguments to parse is not run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import runpy
import sys
from typing import Any

parse_args = argparse.ArgumentParser.parse_args


class Parsed(BaseException):
    """The arguments were taken: whatever the script does next is left out."""


def stop_after_parsing(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
    options[:] = list(parser._option_string_actions)
    parse_args(parser, *args, **kwargs)
    raise Parsed


options: list[str] = []


def take(script: str, arguments: list[str]) -> dict[str, Any]:
    options.clear()
    said = io.StringIO()
    path, environment = list(sys.path), dict(os.environ)
    sys.argv = [script, *arguments]
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            runpy.run_path(script, run_name="__main__")
        said.write("it ended without parsing its arguments")
    except Parsed:
        said.truncate(0)
    except SystemExit as refused:
        if not refused.code:  # --help
            said.truncate(0)
    except Exception as error:
        said.write(f"{type(error).__name__}: {error}")
    finally:
        sys.path[:] = path
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
    return {"options": list(options), "said": said.getvalue()}


if __name__ == "__main__":
    argparse.ArgumentParser.parse_args = stop_after_parsing  # type: ignore[method-assign]
    work = json.load(sys.stdin)
    json.dump([take(*each) for each in work], sys.__stdout__)
