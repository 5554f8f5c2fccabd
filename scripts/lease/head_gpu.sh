#!/usr/bin/env bash
# Old against new inference head on one H200, about 120 to 150 s. Copy this file and the folder head_gpu/ beside each other
# into an ignored folder of the repository, name that folder in `carry`, and run there: bash FOLDER/head_gpu.sh
# (first, at home: bash head_gpu/sync.sh COMMIT). $OUT gets head.json and logs.
#
#   0 to ~50 s  every variant compiled by 9 processes into one cache; beside it the GPU tests of vocab_head (new code)
#   then 75 s   per case: all variants checked (ids against old, logits against float64, repeat), then 25 interleaved
#               graph replays each; stops by itself before a case when its budget is over. Most wanted cases first.
#
# Predictions (microseconds; floors at 4.33 TB/s; "old" should show what docs/PERFORMANCE.md has):
#  A (151936, 2560) r 320 B 1 bf16, floor 25.6, bar 1.25 = 32.0, old 36.8. Old reads 5 KB a step and program (512 lanes are
#    planned for, 320 come), 10 KB in flight x 5 programs, 50 barriers a tile: bound by latency, not bytes.
#    pre (whole tile prefetched into L2 by one instruction at the start) 32 to 33; c256 (row in one warp, 26 barriers) 35;
#    c64 p1 (whole tile in flight in registers, 3 programs, 10 barriers, 528 instead of 1040 instructions) 30;
#    c64 p1 r64 (the same, 4 programs) 29.5; p2 31.
#    Other B = 1: r 512 bf16 old 45.9, pre 45, c256 45.5; fp8 r 320 old 20.5, pre 19.5 (no bar; may do nothing).
#  B B 64: rescoring ran as 3.6 (V 151936) or 2.4 (V 100352) waves of one program a multiprocessor; the list shares rows
#    out equally: x 0.9 and x 0.79 of rescoring's part. "new -pre -across" is the list alone:
#      4096 r512 bf16 287 -> 270, int8/fp8 285 -> 267; 2560 r320 195 -> 182; 100352 210 -> 185.
#    across (62 instead of 113 shuffles, 72 instead of 95 registers; fp8 loads 16 instead of 8 bytes wide) a further -4 (fp8 -6);
#    pre a further -6 to -10 (memory idles while down_proj and rounding run; later tiles wait for L2, not DRAM).
#    new: 4096 r512 bf16 258 (1.18 floors), 8 bits 252 (1.26); 2560 172 (1.27); 100352 175 (1.21). Bars 1.4: met.
#    (int8 "-pre" and "-pre -across" take 98 to 106 registers, so 4 programs a multiprocessor where old and new have 5:
#    they show the list and the product with a handicap of their own.)
#    r128x2 +-3 % (hides the bubbles between passes, reads the hidden states from L2 twice as often).
#    old t3 (block shapes alone) 4096 275, 100352 195.
#  C B 10 tree: rescoring had 75 (tile 256) or 149 (tile 128) programs for 132 multiprocessors; now 264.
#      2560 r160 int8, bar 1.6 = 27.9: t256 29.7 -> list alone 27, + pre 24, + rows 23; t128 31.9 -> 29, 26, 25;
#      fp8 t256 33.1 -> 26.5; shared int8 27.4 -> 22.
#      4096 r256 fp8, bar = 42.3: t256 43.7 -> 35; t128 42.8 -> 36; int8 t256 38.3 -> 31.
#    k32s3 (fp8 only: 90 instead of 122 registers, one wave instead of 1.12) -2 for t256 fp8.
#    If "new" is slower than "new -pre -rows": prefetching takes bandwidth from the down_proj kernel; drop it.
# "old" is main, "new" the branch head. Kernels of the script that did not compile or run are named and left out.
# Then: set block_shapes on the branch to the winners (A: COLUMNS/PARTS where a 16-bit rank is no power of two), land.
set -u
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/head_gpu
OUT=${OUT:-head_out}; mkdir -p "$OUT"
export TRITON_CACHE_DIR=/tmp/head_triton OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
PY=python3
began=$SECONDS
N=9
pids=()
for ((i = 0; i < N; i++)); do
    timeout 100 $PY "$HERE/bench.py" compile $i $N >"$OUT/compile.$i.log" 2>&1 &
    pids+=($!)
done
# Its own conftest; -c keeps the repository's options and plugins away. The prefetches have no interpreter: run first here.
(cd "$HERE/tests" && PYTHONPATH=$HERE/new timeout 80 $PY -m pytest -q -x -n 6 -p no:cacheprovider -c /dev/null \
    --rootdir "$HERE/tests" test_vocab_head.py \
    -k "(several_rows_in_other and (bf16 or fp8)) or (pieces_of_columns and 320) or (full_size and selection1) or (cuda_graph and selection1) or offsets" \
    >"$OUT/pytest.log" 2>&1; echo "pytest exit $?" >>"$OUT/pytest.log") &
tests=$!
wait "${pids[@]}"
cat "$OUT"/compile.*.log | sort -u | head -20 | cut -c1-300
echo "compiled after $((SECONDS - began)) s"
wait $tests
tail -8 "$OUT/pytest.log" | cut -c1-300
echo "tested after $((SECONDS - began)) s"
left=$((145 - (SECONDS - began)))
((left > 25)) || left=25
timeout $((left + 10)) $PY "$HERE/bench.py" run "$OUT/head.json" $((left - 10)) 2>&1 | tee "$OUT/run.log"
mkdir -p "$OUT/logs"; mv "$OUT"/compile.*.log "$OUT/logs/"; tar cf "$OUT/compile_logs.tar" -C "$OUT" logs && rm -r "$OUT/logs"
echo "done after $((SECONDS - began)) s"
