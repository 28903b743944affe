"""The GPU kernels of the operator, in Triton: one launch for a short sequence, a few for a long one.

    maps, tiles        what kernels share: feature maps, where a program works, tiles of memory
    forward            outputs, in one walk over the tokens
    sums               sums of segments and their running totals, for long sequences and for sums over all keys
    sweep              all gradients in one walk, for narrow heads
    parts              gradients of queries, then of keys and values: wide heads, and sums over all keys
    launch, table      how kernels are started, and with which tile sizes
    run                from a call of the operator to these kernels

Importing this package imports nothing; `linattn.ops.backends_gpu` tells whether it can be used.
"""
