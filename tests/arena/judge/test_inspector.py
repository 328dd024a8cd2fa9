"""The inspector speaks to the judge as other programs do, without what they import for it."""

import ast
import socket
import threading
from pathlib import Path

from trapline.arena.judge import inspector
from trapline.arena.process import wire


def test_its_frames_are_those_of_the_judge():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = wire.Channel(ours)
        said = {"op": "inspected", "text": "ä" * 200_000}
        speaker = threading.Thread(target=inspector._say, args=(theirs, said))
        speaker.start()
        header, body = channel.receive()
        speaker.join()
        assert (header, len(body)) == (said, 0)
        channel.send({"op": "inspect", "config": "a\nb", "nonce": "1"})
        asked = inspector._heard(theirs)
    assert asked == {"op": "inspect", "config": "a\nb", "nonce": "1"}


def test_it_imports_no_numpy():
    for name in ("inspector", "rewrite", "code_from_data"):
        text = Path(inspector.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import)]
        assert not {"numpy", "wire"} & {alias.name for node in nodes for alias in node.names}
