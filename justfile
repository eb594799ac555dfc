# Shortcuts; the commands are in .ci/run, which needs no just.

# What has to pass before a commit is pushed.
check:
    bash .ci/run fmt clippy test doc deps

# Everything that CI runs.
ci:
    bash .ci/run

# The stores' suite against moto and Garage, which it installs.
interop:
    bash .ci/run interop

# The interleavings of the lane; LOOM_MAX_PREEMPTIONS=3 and above for more of them.
loom:
    bash .ci/run loom

# The lane's tests under ThreadSanitizer.
tsan:
    bash .ci/run tsan

# Every decoder on a fuzzer's bytes; FUZZ_RUNS, FUZZ_SEED and FUZZ_CORPUS for more of them: see fuzz/run.
fuzz:
    bash .ci/run fuzz

# The benches in earnest; on a quiet machine only.
bench:
    bash .ci/run bench

# Many kill -9 cycles.
crash:
    bash .ci/run crash
