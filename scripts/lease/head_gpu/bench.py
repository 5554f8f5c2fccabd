"""Old against new inference head for every missed bar: compile in parallel, check, time interleaved.

    bench.py compile I N     # this process's share of the variants, on small vocabularies (same compiled code)
    bench.py run OUT.json    # check and time
"""

import importlib
import json
import statistics
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
DEV = "cuda" if torch.cuda.is_available() else "cpu"


def load(side):
    """The kernels of one side; the modules of the other stay alive under their own objects."""
    for name in [n for n in sys.modules if n.split(".")[0] == "specvocab_kernels"]:
        del sys.modules[name]
    sys.path.insert(0, str(HERE / side))
    try:
        head = importlib.import_module("specvocab_kernels.vocab_head")
        kernel = importlib.import_module("specvocab_kernels.vocab_head.kernel")
        assert str(HERE / side) in kernel.__file__
        return head, kernel
    finally:
        sys.path.pop(0)


S = lambda k, st, w=4, **kw: dict(select=dict(BLOCK_K=k, STAGES=st, num_warps=w, **kw))
R = lambda s, d, st, p, w=4: dict(rescore=dict(SLOTS=s, BLOCK_D=d, STAGES=st, PER_MULTIPROCESSOR=p, num_warps=w))
OLD_R = lambda t, s, d, st, w=4: dict(rescore=dict(TILES=t, SLOTS=s, BLOCK_D=d, STAGES=st, num_warps=w))
P = dict(PREFETCH=True)
NO = dict(select=dict(PREFETCH=False))

ONE_320 = {
    "old": ("old", {}),
    "pre": ("new", dict(one=P)),
    "old p4": ("old", dict(one=dict(PARTS=4))),
    "c256": ("new", dict(one=dict(COLUMNS=256))),
    "c256 pre": ("new", dict(one=dict(COLUMNS=256, **P))),
    "c64 p1": ("new", dict(one=dict(COLUMNS=64, PARTS=1))),
    "c64 p1 pre": ("new", dict(one=dict(COLUMNS=64, PARTS=1, **P))),
    "c64 p1 r64": ("new", dict(one=dict(COLUMNS=64, PARTS=1, maxnreg=64))),
    "c64 p1 r64 pre": ("new", dict(one=dict(COLUMNS=64, PARTS=1, maxnreg=64, **P))),
    "c64 p2": ("new", dict(one=dict(COLUMNS=64, PARTS=2))),
    "c64 p4 w4": ("new", dict(one=dict(COLUMNS=64, PARTS=4, num_warps=4))),
}
ONE_FEW = {
    "old": ("old", {}),
    "pre": ("new", dict(one=P)),
    "c256": ("new", dict(one=dict(COLUMNS=256))),
    "c256 pre": ("new", dict(one=dict(COLUMNS=256, **P))),
}
ONE_8BIT = {"old": ("old", {}), "pre": ("new", dict(one=P))}
B64 = {
    "old": ("old", {}),
    "new": ("new", {}),
    "new -pre": ("new", NO),
    "new -across": ("new", dict(select=dict(ACROSS=False))),
    "new -pre -across": ("new", dict(select=dict(ACROSS=False, PREFETCH=False))),  # the shared-out list alone
    "new r128x2": ("new", R(128, 64, 4, 2)),
    "new r256s5": ("new", R(256, 64, 5, 1, 8)),
    "new k128s2": ("new", S(128, 2)),
    "old t3": ("old", OLD_R(3, 128, 64, 4)),  # block shapes alone
}
B10 = {
    "old": ("old", {}),
    "new": ("new", {}),
    "new -pre": ("new", NO),
    "new -rows": ("new", dict(select=dict(PREFETCH_ROWS=False))),
    "new -pre -rows": ("new", dict(select=dict(PREFETCH=False, PREFETCH_ROWS=False))),
    "new r32x2": ("new", R(32, 256, 4, 2)),
    "new r16x4": ("new", R(16, 256, 4, 4)),
    "new r64x2": ("new", R(64, 128, 5, 2)),
    "new k32s3": ("new", S(32, 3)),
    "old t4": ("old", OLD_R(4, 32, 256, 4)),
}
SHARED = {k: B10[k] for k in ("old", "new", "new -pre -rows", "new r16x4")}
# name: V, d, r, tile, precision, B, shared, bar, its unit, variants
CASES = {
    "A 2560 r320 B1 bf16": (151936, 2560, 320, 64, "bf16", 1, False, 1.25, "floors", ONE_320),
    "A 2560 r320 B1 fp8": (151936, 2560, 320, 64, "fp8", 1, False, None, "", ONE_8BIT),
    "B 2560 r320 B64 bf16": (151936, 2560, 320, 64, "bf16", 64, False, 1.4, "floors", B64),
    "C 2560 r160 t256 B10 int8": (151936, 2560, 160, 256, "int8", 10, False, 1.6, "x 32k", B10),
    "C 2560 r160 t128 B10 int8": (151936, 2560, 160, 128, "int8", 10, False, 1.6, "x 32k", B10),
    "C 2560 r160 t256 B10 fp8": (151936, 2560, 160, 256, "fp8", 10, False, 1.6, "x 32k", B10),
    "C 2560 r160 t256 B10 int8 shared": (151936, 2560, 160, 256, "int8", 10, True, 1.6, "x 32k", SHARED),
    "A 4096 r512 B1 bf16": (151936, 4096, 512, 64, "bf16", 1, False, 1.25, "floors", ONE_FEW),
    "A 4096 r256 t256 B1 fp8": (151936, 4096, 256, 256, "fp8", 1, False, None, "", ONE_8BIT),
    "B 4096 r512 B64 bf16": (151936, 4096, 512, 64, "bf16", 64, False, 1.4, "floors", B64),
    "B 4096 r512 B64 int8": (151936, 4096, 512, 64, "int8", 64, False, 1.4, "floors", B64),
    "B 4096 r512 B64 fp8": (151936, 4096, 512, 64, "fp8", 64, False, 1.4, "floors", B64),
    "C 4096 r256 t256 B10 fp8": (151936, 4096, 256, 256, "fp8", 10, False, 1.6, "x 32k", B10),
    "C 4096 r256 t128 B10 fp8": (151936, 4096, 256, 128, "fp8", 10, False, 1.6, "x 32k", B10),
    "C 4096 r256 t256 B10 int8": (151936, 4096, 256, 256, "int8", 10, False, 1.6, "x 32k", B10),
    "B 100352 r512 B64 bf16": (100352, 4096, 512, 64, "bf16", 64, False, 1.4, "floors", B64),
    "B 100352 r512 B64 int8": (100352, 4096, 512, 64, "int8", 64, False, 1.4, "floors", B64),
}


def weights_of(head, tensors, vocab, tile, precision):
    lm_head, down, proj, scales = tensors
    return head.HeadWeights(
        lm_head=lm_head, down_proj=down, vocab_proj=proj, selection=head.TileSelection(vocab, tile, 1), scales=scales
    )


def make(vocab, d, r, tile, precision, lm_head):
    rows = -(-vocab // tile) * tile
    down = torch.randn(r, d, device=DEV, dtype=torch.bfloat16) * d**-0.5
    proj = torch.randn(rows, r, device=DEV, dtype=torch.bfloat16)
    scales = None
    if precision != "bf16":
        largest = 448.0 if precision == "fp8" else 127.0
        scales = proj.abs().amax(1).float() / largest
        scaled = proj / scales[:, None]
        proj = scaled.to(torch.float8_e4m3fn) if precision == "fp8" else scaled.round().to(torch.int8)
    return lm_head, down, proj, scales


def hidden_of(rows, d):
    hidden = torch.randn(rows, d, device=DEV)
    if rows == 10:
        hidden = 0.85**0.5 * torch.randn_like(hidden[:1]) + 0.15**0.5 * hidden
    return hidden.bfloat16()


def call(kernel, hidden, weights, shared, changes):
    shapes = kernel.block_shapes(weights, hidden.shape[0], shared)
    config = {name: {**shapes[name], **change} for name, change in changes.items()}
    ids = torch.empty(hidden.shape[0], weights.selection.num_candidates, dtype=torch.int32, device=DEV)
    logits = torch.empty(ids.shape, dtype=torch.float32, device=DEV)
    kernel.tile_head(hidden, weights, ids, logits, shared=shared, config=config)
    return ids, logits


def compile_share(index, count):
    sides = {side: load(side) for side in ("old", "new")}
    jobs = [(case, variant) for case in CASES for variant in CASES[case][-1]]
    # Neighbouring jobs share kernels: a process takes every count-th case's variants in turn, spread.
    for job, (case, variant) in enumerate(jobs):
        if job % count != index:
            continue
        _, d, r, tile, precision, rows, shared, _, _, variants = CASES[case]
        side, changes = variants[variant]
        vocab = 3 * tile
        lm_head = torch.randn(vocab, d, device=DEV, dtype=torch.bfloat16)
        head, kernel = sides[side]
        weights = weights_of(head, make(vocab, d, r, tile, precision, lm_head), vocab, tile, precision)
        try:
            call(kernel, hidden_of(rows, d), weights, shared, changes)
            torch.cuda.synchronize()
        except Exception as error:  # reported again by the run, which goes on without the variant
            print(case, variant, repr(error)[:200], flush=True)


def event_ms(run):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def captured(calls):
    for c in calls:
        c()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for c in calls:
            c()
    return graph


def check(outputs, reference, hidden, lm_head):
    """Share of ids equal to the old kernel's, and the relative error of the logits in float64 for two rows."""
    ids, logits = outputs
    assert ids.min() >= 0 and ids.max() < lm_head.shape[0]
    assert (ids.long().sort(1).values.diff(dim=1) > 0).all(), "ids repeat"
    error = 0.0
    for b in {0, hidden.shape[0] - 1}:
        exact = lm_head[ids[b].long()].double() @ hidden[b].double()
        error = max(error, float((logits[b].double() - exact).norm() / exact.norm()))
    return float((ids == reference[0]).float().mean()), error


def run(out, budget):
    started = time.time()
    torch.manual_seed(0)
    sides = {side: load(side) for side in ("old", "new")}
    source = torch.ones(1 << (30 if DEV == 'cuda' else 10), device=DEV)
    source.sum()
    bandwidth = 4 * (1 << 30) / statistics.median(event_ms(lambda: source.sum()) for _ in range(20)) * 1e3
    del source
    print(f"{torch.cuda.get_device_name()} reads {bandwidth / 1e9:.0f} GB/s", flush=True)
    report = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, bytes_per_second=bandwidth, cases={})
    lm_head, static, lm_shape = None, {}, None
    for case, (vocab, d, r, tile, precision, rows, shared, bar, unit, variants) in CASES.items():
        if time.time() - started > budget:
            print(f"out of time before {case}", flush=True)
            break
        if lm_shape != (vocab, d):
            lm_head, static, lm_shape = torch.randn(vocab, d, device=DEV, dtype=torch.bfloat16), {}, (vocab, d)
        size = vocab * r * (2 if precision == "bf16" else 1)
        sets = [make(vocab, d, r, tile, precision, lm_head) for _ in range(max(2, -(-256_000_000 // size) if DEV == 'cuda' else 2))]
        hidden = [hidden_of(rows, d) for _ in sets]
        if rows not in static:
            slices = [lm_head[s : s + 32000] for s in range(0, max(1, vocab - 32000), 32000)]
            static[rows] = captured([lambda u=u: torch.nn.functional.linear(hidden[0], u) for u in slices] * 2)
            static[rows, "calls"] = 2 * len(slices)
        graphs, results, reference = {}, {}, None
        for variant, (side, changes) in variants.items():
            head, kernel = sides[side]
            weights = [weights_of(head, tensors, vocab, tile, precision) for tensors in sets]
            try:
                outputs = call(kernel, hidden[0], weights[0], shared, changes)
                torch.cuda.synchronize()
                reference = reference or outputs
                same, error = check(outputs, reference, hidden[0], lm_head)
                again = call(kernel, hidden[0], weights[0], shared, changes)
                repeat = all(torch.equal(a, b) for a, b in zip(outputs, again, strict=True))
                calls = [lambda k=kernel, h=h, w=w, c=changes: call(k, h, w, shared, c) for h, w in zip(hidden, weights)]
                times = max(1, -(-8 // len(calls)))
                graphs[variant] = captured(calls * times), len(calls) * times
                results[variant] = dict(same_ids=same, logit_error=error, repeats=repeat)
            except torch.cuda.OutOfMemoryError as error_:
                print(case, variant, repr(error_)[:200], flush=True)
            except Exception as error_:
                if "illegal" in repr(error_) or "launch failure" in repr(error_):
                    raise
                print(case, variant, repr(error_)[:200], flush=True)
        samples = {variant: [] for variant in graphs} | {"32k": []}
        for turn in range(26):
            for variant, (graph, calls) in graphs.items():
                ms = event_ms(graph.replay) / calls
                if turn:
                    samples[variant].append(ms * 1e3)
            ms = event_ms(static[rows].replay) / static[rows, "calls"]
            if turn:
                samples["32k"].append(ms * 1e3)
        distinct = statistics.mean(
            int(call(sides["old"][1], h, weights_of(sides["old"][0], s, vocab, tile, precision), shared, {})[0].unique().numel())
            for s, h in zip(sets[:4], hidden[:4])
        )
        moved = r * d * 2 + sum(x.numel() * x.element_size() for x in (sets[0][2], hidden[0])) + distinct * d * 2
        floor = moved / bandwidth * 1e6
        k32 = statistics.median(samples["32k"])
        print(f"\n{case}: floor {floor:.1f} us, 32k {k32:.1f} us, bar {bar} {unit}")
        for variant, result in results.items():
            us = statistics.median(samples[variant])
            half = statistics.median(samples[variant][: len(samples[variant]) // 2])
            result.update(us=us, first_half_us=half, floors=us / floor, times_32k=k32 / us)
            good = "" if bar is None else ("ok" if (us / floor <= bar if unit == "floors" else k32 / us >= bar) else "MISS")
            print(
                f"  {variant:18s} {us:7.2f} us ({half:6.2f})  {us / floor:5.2f} floors  {k32 / us:5.2f} x 32k  {good:4s}"
                f"  ids {result['same_ids']:.4f} err {result['logit_error']:.1e}{'' if result['repeats'] else ' DIFFERS ON REPEAT'}",
                flush=True,
            )
        report["cases"][case] = dict(floor_us=floor, us_32k=k32, bar=bar, unit=unit, variants=results)
        Path(out).write_text(json.dumps(report, indent=1))
        del graphs, sets
    print(f"timed in {time.time() - started:.0f} s", flush=True)


def tiny():
    """A dry run in the interpreter: that every variant is right, on small shapes."""
    global CASES, event_ms, captured
    torch.cuda.synchronize = lambda: None
    torch.cuda.get_device_name = lambda: "CPU"
    CASES = {n: (tile * 2 + 9, 96, 80, tile, p, min(b, 20), *rest) for n, (_, _, r, tile, p, b, *rest) in CASES.items()}
    event_ms = lambda run: (run(), 1.0)[1]

    class captured:
        def __init__(self, calls): calls[0]()
        def replay(self): pass


if __name__ == "__main__":
    if DEV == "cpu":
        tiny()
    if sys.argv[1] == "compile":
        compile_share(int(sys.argv[2]), int(sys.argv[3]))
    else:
        run(sys.argv[2], float(sys.argv[3]) if len(sys.argv) > 3 else 60.0)
