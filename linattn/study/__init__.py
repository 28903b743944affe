"""What the paper left open, measured: which feature map for which task, what short sequences cost, how far it reaches.

linattn study --quick            # under five minutes on two CPU cores
linattn report study             # docs/study.md from what was recorded

sizes      how large everything is, quick and full
arms       what is compared: every feature map, softmax, Reformer, at equal parameters
plan       which small runs there are, by what is known so far; each is a `Job`
kinds      how a job of each kind is done: learn, music, speech, lengths, timing
folder     what was found, one line a job, in one file
work       jobs side by side, a clock, and an end at any time
conclude   what the numbers say, and what they do not; report and plots show it
"""
