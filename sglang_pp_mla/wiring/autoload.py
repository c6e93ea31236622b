"""Imported by the ``.pth`` in every Python process: wait for ``sglang``, cost next to nothing until then.

No import at the top but ``sys``, since most processes of an environment never see SGLang.
"""

import sys


class ArmOnSGLang:
    """A finder that finds nothing: it arms the fixes just before ``sglang`` is first imported.

    It stays afterwards: taking it out of ``sys.meta_path`` would make an import that another thread has
    under way skip a finder.
    """

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name == "sglang":
            try:
                from sglang_pp_mla.wiring import arm

                arm()
            except Exception:  # SGLang must start without us, and say why it does
                import logging

                logging.getLogger("sglang_pp_mla").exception("sglang-pp-mla could not be armed and does nothing.")
        return None


if ArmOnSGLang not in sys.meta_path:
    sys.meta_path.insert(0, ArmOnSGLang)
