"""Answer buffer probes with a stage's own layers while an attention backend is being built.

A KV pool holds the layers of one pipeline stage and indexes them as ``layer_id - start_layer``. An
initialiser that asks it for layer 0 gets an ``IndexError`` on a stage that starts behind its own
layer count, and silently the buffer of another layer on one that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

# Asked with a model layer id by initialisers. Other getters of a pool may number layers their own way.
GETTERS = ("get_key_buffer", "get_value_buffer", "get_kv_buffer")

_MARK = "_answers_with_local_layers"


def held_layers(pool: Any) -> Sequence[int]:
    """Ids that the pool's getters answer, in the pool's own numbering; empty if that is unknown."""
    for mapping_name in ("full_attention_layer_id_mapping", "layers_mapping"):
        mapping = getattr(pool, mapping_name, None)
        if isinstance(mapping, Mapping):
            return tuple(mapping)
    start = getattr(pool, "start_layer", None)
    count = getattr(pool, "layer_num", None)
    if start is None or count is None:
        return ()
    return range(start, start + count)


@contextmanager
def stage_local_probes(pool: Any) -> Iterator[None]:
    """Answer a probe for a layer the pool does not hold with the first layer that it does.

    Works on the instance ``pool`` and on the pools inside it, and takes everything away again at the
    end. Builders nest, so an inner use leaves to the outermost one what that has put there. ``pool``
    may be ``None`` or anything without buffers; then nothing happens.
    """
    with ExitStack() as undo:
        for part in _with_inner_pools(pool):
            for name in GETTERS:
                _redirect(part, name, undo)
        yield


def _redirect(pool: Any, name: str, undo: ExitStack) -> None:
    getter = getattr(pool, name, None)
    if getter is None or getattr(getter, _MARK, False):
        return
    own = vars(pool)
    before = own.get(name)  # somebody else's patch on the instance
    own[name] = local = _local(pool, getter)

    def put_back() -> None:
        if own.get(name) is not local:  # somebody else has patched the instance meanwhile: theirs stays
            return
        if before is None:
            del own[name]
        else:
            own[name] = before

    undo.callback(put_back)


def _local(pool: Any, getter: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(getter)
    def get_buffer(layer_id: Any, *args: Any, **kwargs: Any) -> Any:
        layers = held_layers(pool)
        if isinstance(layer_id, int) and layers and layer_id not in layers:
            layer_id = layers[0]
        return getter(layer_id, *args, **kwargs)

    setattr(get_buffer, _MARK, True)
    return get_buffer


def _with_inner_pools(pool: Any) -> list[Any]:
    """The pool and the pools it is made of, outermost first."""
    found: list[Any] = []
    waiting = [pool]
    while waiting:
        part = waiting.pop()
        if not hasattr(type(part), "get_value_buffer") or not hasattr(part, "__dict__"):
            continue
        if any(part is other for other in found):
            continue
        found.append(part)
        waiting.extend(vars(part).values())
    return found
