"""`refit demo`: trainers and rollouts in real processes on one machine, each push checked bit by bit.

The demo is a program like a user's own: it goes through the public face only, and the check shares nothing with it.

config      what a decoder's shape is, read from a Hugging Face `config.json` or picked by size (no torch)
checkpoint  a directory of safetensors files, checked against its config before anything starts (no torch)
model       the decoder, in plain torch
train       the trainer's half: FSDP2, an optimizer step, a push
rollout     the generating half: tensor parallel in bfloat16, a receive, the comparison
oracle      the judge: what every element must be, gathered with torch's own collectives
job, rows   what each process is told, and what comes back, as values (no torch)
processes   starting, watching and ending processes
run         options in, rows out
"""
