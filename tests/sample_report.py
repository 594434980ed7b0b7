"""What verbs and layers leave, made up but for the committed measurements, and the page of it all.

`PYTHONPATH=src python tests/sample_report.py build/browser` makes report.html there, and hostile.html with names to match.
"""

import json
import math
import random
import sys
from dataclasses import asdict, replace
from pathlib import Path

from treemla.gate import merge, page, schema, static_gate
from treemla.gate.bless import LEDGER, Blessing
from treemla.gate.exits import Exit
from treemla.gate.findings import Finding, Findings
from treemla.gate.kernelcode import KernelCode
from treemla.gate.report import table

CHECKOUT = Path(__file__).parents[1]
HOSTILE = '<img src=x onerror="window.hit=1">&amp;</table></script><b>\'"é\u202e'
CASES = ("verify-b1-c65536-t9-h8-p1-bf16", "verify-b8-c16384-t9-h8-p1-bf16")
WHERE = schema.Where(
    "NVIDIA H200", "580.1", "13.0", "2.11.0", "3.6.0", "0.5.16", "f" * 40, "2026-01-02T03:04:05Z", "python -m treemla gate",
    fingerprint="0123456789ab", arch="sm_90", start="aaaaaaaaaaaa",
)  # fmt: skip
LOOP = {"HGMMA.64x72x16.F32.BF16": 36, "LDS.128": 10, "BAR.SYNC": 2, "FFMA": 300}
OLD = KernelCode(
    "sm_90a", "treemla_verify_wgmma_r72", "13.0.88", "a" * 64, 128, 3, 0, 0, 232_400, 1,
    {**LOOP, "LDG.E.128": 64, "STG.E.128": 16}, (LOOP,),
)  # fmt: skip
WIDE_TO_NARROW = {"LDG.E.128": 0, "LDG.E.64": 128}
NEW = replace(
    OLD,
    sha256="b" * 64,
    registers=136,
    opcodes={**OLD.opcodes, **WIDE_TO_NARROW},
    loops=({**LOOP, "BAR.SYNC": 3, "FFMA": 330},),
)


def nights() -> list[schema.Measurement]:
    """24 nights of two cases, of which the second becomes 8% slower on the 14th; and the first one's ratio to Triton."""
    noise = random.Random(1)
    made = []
    for night in range(24):
        where = replace(WHERE, date=f"2026-02-{night + 1:02}T03:17:00Z", treemla=f"{night:02}" * 20)
        for case, us in zip(CASES, (33.5, 55.3 * (1.08 if night >= 13 else 1.0)), strict=True):
            made.append(schema.Measurement.of(case, "verify", "us", [us * math.exp(noise.gauss(0, 0.004))], where))
        ratio = 0.00266 * math.exp(noise.gauss(0, 0.004))
        made.append(schema.Measurement.of(CASES[0], "triton_ratio", "ratio", [ratio], where))
    return made


def blessings(reason: str) -> list[Blessing]:
    first = Blessing(
        "b-0001", "2026-02-03", "ana", CASES[1], "verify", "0123456789ab", None, 55.3, 0.0, 3, "first figures", None
    )
    return [first, replace(first, id="b-0002", date="2026-02-16", old=55.3, new=59.7, creep=0.08, reason=reason)]


def gate(name: str) -> Findings:
    def found(case: str, verdict: str, code: Exit, text: str, base: str) -> Finding:
        return Finding(case, verdict, code, text, {"us": "33.5", "vs base": base, "vs Triton": "376.0x faster"})

    slower = "+8.1% beside the base (+7.4% to +8.8%, 8 processes), allowed +3.0%"
    return Findings(
        "gate",
        (
            found(CASES[0], "same", Exit.PASS, "", "+0.2% (-0.5%..+0.9%)"),
            found(CASES[1], "regression", Exit.FAILED, slower, "+8.1% (+7.4%..+8.8%)"),
            found(name, "ambiguous", Exit.AMBIGUOUS, "too noisy to tell", "+2.9% (-4.0%..+9.8%)"),
        ),
        ("Detectable today: +3.4% in the noisiest case.",),
    )


def static() -> Findings:
    predicted = table(
        ["case", "GPU", "predicted us", "bound by", "measured us"],
        [[CASES[0], "H200", "30.4", "DRAM", "34.5"], [CASES[0], "RTX PRO 6000", "55.9", "DRAM", "-"]],
    )
    same = replace(OLD, kernel="treemla_verify_wgmma_r8")
    data = {"old": asdict(OLD), "new": asdict(NEW)}
    return Findings(
        "static",
        (
            Finding("sm_90a treemla_verify_wgmma_r8", "same", Exit.PASS, "", static_gate.cells(same, same)),
            Finding("sm_90a treemla_verify_wgmma_r72", *static_gate.judge(OLD, NEW), static_gate.cells(OLD, NEW), data),
        ),
        (f"What the instructions allow, by a model of one tile:\n\n{predicted}\nMedian error 12%.\n",),
    )


def make_sources(folder: Path, name: str) -> list[Path]:
    """Files in `folder`, its ledger of blessings too; the sources are these and the committed measurements. name: of a
    case, and whatever else a person may choose.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for findings in (gate(name), static()):
        findings.write(folder / f"{findings.title}.json", None, None)
    schema.dump(folder / "nights.jsonl", nights())
    (folder / LEDGER).write_text("".join(json.dumps(asdict(blessing)) + "\n" for blessing in blessings(name)))
    (folder / "unit.xml").write_text('<testsuites><testcase classname="a" name="x"/></testsuites>')
    made = [folder / name for name in ("gate.json", "static.json", "unit.xml", "nights.jsonl")]
    return [*made, *sorted((CHECKOUT / "docs/measured").glob("*.jsonl"))]


def make_page(path: Path, name: str) -> None:
    folder = path.with_suffix(".sources")
    sources = make_sources(folder, name)
    page.write(path, merge.merge(sources, {}), sources, folder)


if __name__ == "__main__":
    make_page(Path(sys.argv[1]) / "report.html", "verify-b32-c4096-t9-h8-p1-bf16")
    make_page(Path(sys.argv[1]) / "hostile.html", HOSTILE)
