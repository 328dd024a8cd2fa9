"""Tries the attacks of the GPU track, with all defences and without their own, and prints a table.

`python tests/arena/gpu/campaign.py [NAME …] [--part K/N]`: one line an attack. Exit code 4: an
attack succeeds, or does not succeed although its defence is off.
`python tests/arena/gpu/campaign.py --page RESULTS`: the page of a campaign whose results are kept.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "certify"))
sys.path.insert(0, str(Path(__file__).parent))

import gpu_switches

from trapline.arena.certify import red_team
from trapline.arena.runs.run import choose_level


def attempt(cheat, level, *, off):
    """What the attack gained."""
    patch = gpu_switches.Patches()
    with tempfile.TemporaryDirectory(prefix="trapline-") as folder:
        os.chmod(folder, 0o777)
        bench = gpu_switches.new_bench(patch, folder, level)
        try:
            gpu_switches.prepare(bench, cheat)
            if off:
                gpu_switches.switch_off(bench, cheat)
            return bench.judge(bench, cheat)
        finally:
            patch.undo()


def row(cheat, level, only=""):
    """Name, what it gained, what it gained without its defence, whether that is as it should be."""
    left_out = red_team._why_left_out(cheat)
    if left_out:
        return cheat.name, f"left out: {left_out}", "", True
    begun = time.monotonic()
    gained = "" if only == "off" else attempt(cheat, level, off=False)
    untried = cheat.never_because or only == "on"
    won = "not tried" if untried else attempt(cheat, level, off=True)
    good = not gained and bool(won)
    seconds = time.monotonic() - begun
    told = f"SUCCEEDS: {gained}" if gained else "not tried" if only == "off" else "defended"
    return cheat.name, told, f"{won or 'DOES NOT SUCCEED'} ({seconds:.0f} s)", good


def page(results, corpus):
    """`docs/red-team-gpu.md`. Results: attack → what it gained with all defences (empty: nothing),
    and without its own (empty: not tried there)."""
    attempts = results["attacks"]
    proved = sum(bool(one["without"]) for one in attempts.values())
    rows = []
    for cheat in corpus:
        one = attempts[cheat.name]
        gained = f"**{one['gained']}**" if one["gained"] else one.get("left out") or "nothing"
        off = ", ".join(cheat.succeeds_without)
        how = f"off: {off}" if off else f"at level {', '.join(cheat.succeeds_at)}"
        without = f"{one['without']} ({how})" if one["without"] else ""
        shown = without or cheat.never_because or one["left out"]
        cells = (f"`{cheat.name}`", cheat.attack, cheat.defence, gained, shown)
        rows.append(f"| {' | '.join(text.replace('|', '/') for text in cells)} |")
    tried = [one for one in attempts.values() if "left out" not in one]
    lines = [
        "# Red team of the GPU track",
        "",
        "Hostile answers to a small GPU challenge (`tests/arena/gpu_cheats`). An attack succeeds",
        "when it passes, or gets more than it deserves, or keeps the judge from judging. Each ran",
        "twice: with all defences, and with its own off (`tests/arena/gpu/gpu_switches.py`),",
        "which shows that it is a real attack. How they are kept in: [security](security.md),",
        "[GPU track](gpu-track.md).",
        "",
        "Written by `python tests/arena/gpu/campaign.py --page RESULTS`; do not edit. Results:",
        "`benchmarks/results/nvidia-h200/gpu_red_team.json`.",
        "",
        f"- {results['machine']}",
        f"- **Attack success: {sum(bool(one['gained']) for one in tried)} of {len(tried)}**.",
        f"- Not counted: {len(attempts) - len(tried)} of the {len(attempts)} attacks below; they "
        "attack what stands in for a GPU.",
        f"- Without their own defence: {proved} succeed.",
        "",
        "| attack | what it tries | what stops it | gains | gains without that defence |",
        "|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--part", default="0/1", help="every N-th attack, beginning with K")
    parser.add_argument("--only", choices=("on", "off"), default="", help="defences on, or off")
    parser.add_argument("--page", metavar="RESULTS", help="print the page of these results")
    given = parser.parse_args()
    if given.page:
        results = json.loads(Path(given.page).read_text())
        print(page(results, red_team.read_corpus(red_team.find_corpus("gpu"))), end="")
        return
    part, parts = map(int, given.part.split("/"))
    level = choose_level(forced="landlock")
    corpus = red_team.read_corpus(red_team.find_corpus("gpu"))
    chosen = [cheat for cheat in corpus if not given.names or cheat.name in given.names]
    bad = 0
    for cheat in chosen[part::parts]:
        try:
            name, told, won, good = row(cheat, level, given.only)
        except Exception as error:
            name, told, won, good = cheat.name, f"ERROR {type(error).__name__}: {error}", "", False
        bad += not good
        print(f"{'ok ' if good else 'BAD'} {name:26} {told[:70]:30} | off: {won[:100]}", flush=True)
    raise SystemExit(4 if bad else 0)


if __name__ == "__main__":
    main()
