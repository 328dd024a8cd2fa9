"""Every defence of the sandbox that a test can switch off; the judge's own are in `switches.py`."""

import sys
from dataclasses import replace

import benches
from bench import ARENA, add_to_environment
from switches import switch

from trapline.arena.process import sandbox
from trapline.arena.process.isolation import bubblewrap, plan


@switch("sandbox")
def plain_process(bench):
    bench.level = "process"


@switch("stack-that-says-nothing")
def telling_stack(bench):
    called, defined = "self.call(header, ", "    def call(self, header"
    pairs = [(text, text.replace("call", "check")) for text in (called, defined)]
    bench.edit(ARENA / "process" / "worker.py", *pairs)


@switch("modules-before-submission")
def submission_first(bench):
    beside = "sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))"
    bench.edit(ARENA / "process" / "worker.py", (beside, "sys.path.insert(0, folder)"))


@switch("isolated-interpreter")
def open_interpreter(bench):
    bench.patch.setattr(plan, "FLAGS", ("-B",))
    add_to_environment(bench, PYTHONPATH=":".join(["/submission", *filter(None, sys.path)]))


def add_to_files(bench, *lines):
    files = bubblewrap._files
    last = ["--remount-ro", "/dev", "--remount-ro", "/"]

    def more(launch, stage):
        usual = files(launch, stage)
        assert usual[-4:] == last
        return [*usual[:-4], *lines, *last]

    bench.patch.setattr(bubblewrap, "_files", more)


@switch("hidden-files")
def shown_files(bench):
    add_to_files(bench, *bubblewrap._shown({"/opt/trapline": ARENA.parent}))


@switch("few-devices")
def one_device_more(bench):
    # Harmless: another name for /dev/null.
    add_to_files(bench, "--dev-bind", "/dev/null", "/dev/kmsg")


@switch("closed-descriptors")
def leaking_descriptor(bench):
    start = sandbox._start

    def leaking(spec, command, prepared, group):
        with open(__file__) as ours:
            more = (*command.descriptors, ours.fileno())
            return start(spec, replace(command, descriptors=more), prepared, group)

    bench.patch.setattr(sandbox, "_start", leaking)


@switch("private-scratch")
def shared_scratch(bench):
    shared = bench.folder / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    writable = bubblewrap._writable
    bench.patch.setattr(
        bubblewrap, "_writable", lambda launch: [*writable(launch), "--bind", str(shared), "/tmp"]
    )
    bench.judge = benches.graded_twice
