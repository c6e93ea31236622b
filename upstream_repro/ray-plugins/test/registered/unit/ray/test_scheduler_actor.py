"""Unit tests for the Ray scheduler actor -- no Ray, no server, no model loading."""

import importlib
import inspect
import types
import unittest
from importlib.metadata import EntryPoint
from unittest.mock import patch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase, maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()  # must precede any import that pulls in sgl_kernel

from sglang.srt import plugins

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

SCHEDULER = "sglang.srt.managers.scheduler"


class ReachedScheduler(Exception):
    """The actor asked the scheduler's module for a name: far enough for these tests."""


def scheduler_actor_class():
    """The class as written. Ray is optional: a decorator that does nothing stands for it."""
    ray = types.ModuleType("ray")
    ray.remote = lambda actor: actor
    package = types.ModuleType("sglang.srt.ray")  # its __init__ wants more of Ray
    package.__path__ = [
        f"{path}/ray" for path in importlib.import_module("sglang.srt").__path__
    ]
    with patch.dict("sys.modules", {"ray": ray, "sglang.srt.ray": package}):
        return importlib.import_module("sglang.srt.ray.scheduler_actor").SchedulerActor


class TestSchedulerActorPlugins(CustomTestCase):
    def test_plugins_are_loaded_before_the_scheduler_is_imported(self):
        """A hook that replaces a name is too late once `from ... import` has bound it."""
        events = []

        def of_scheduler(name):
            events.append("scheduler")
            raise ReachedScheduler(name)

        plugin = types.ModuleType("plugin_of_this_test")
        plugin.activate = lambda: events.append("plugin")
        scheduler = types.ModuleType(SCHEDULER)
        scheduler.__getattr__ = of_scheduler
        found = [
            EntryPoint(
                "test", f"{plugin.__name__}:activate", plugins.GENERAL_PLUGINS_GROUP
            )
        ]
        actor = scheduler_actor_class()
        arguments = len(inspect.signature(actor.__init__).parameters) - 1
        with (
            patch.dict("sys.modules", {SCHEDULER: scheduler, plugin.__name__: plugin}),
            patch.object(plugins, "_plugins_loaded", False),
            patch.object(plugins, "entry_points", lambda group: found),
            self.assertRaises(ReachedScheduler),
        ):
            actor(*[None] * arguments)
        self.assertEqual(events, ["plugin", "scheduler"])


if __name__ == "__main__":
    unittest.main()
