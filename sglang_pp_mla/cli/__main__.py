"""``python -m sglang_pp_mla.cli``."""

from sglang_pp_mla.cli import app

app(prog_name="sglang-pp-mla")
