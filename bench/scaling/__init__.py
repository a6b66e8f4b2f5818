"""Past one machine, on paper: an α–β model of a training step, beside what others published, and up to 1,024 ranks.

    python -m bench.scaling [--measured FILE …] [--out FOLDER]

Exchanges take what `baguakit.costs.lines` says, and steps what `baguakit.costs.overlap` says, the model by which
`bk.tune.plan` plans. `--measured` takes what `bk.tune.probe` found on a cluster (`Network.to_json()`), or numbers by
name, in place of assumed ones.

A message of b bytes takes α + b/β, with β in bytes a second (in `bk.tune` it is seconds a byte). A node has g GPUs and
one network interface that they share; there are m nodes and n = m g ranks; S is the model in fp32, c(S) packed; t_f and
t_b are a rank's forward and backward.

    exchange                          seconds                                                       overlaps
    all-reduce, one ring              M 2(n−1) α + 2(n−1)/n S/β                                     t_b
    all-reduce, by nodes              intra + 2(m−1) α + 2(m−1)/m S/β                               t_b
    compressed, by nodes              intra + 2 α + 2(m−1)/m c(S)/β + codec                         t_b
    decentralized, all leaders        intra + 2(m−1) α + 2(m−1)/m S/β                               t_f + t_b
    low-precision, ring of leaders    intra + α + 2 c(S)/β + codec                                  nothing
    low-precision, one peer           intra + α + c(S)/β + codec                                    nothing
    one peer                          α + S/β                                                       t_f + t_b
    one peer, by nodes                intra + α + S/β                                               t_b
    local steps, every H              1/H of an all-reduce                                          nothing
    free running                      nothing that anybody waits for                                everything

with intra = 2 · 2(g−1)/g S/β_nv (averaged within the node before, and told to all of it afterwards), M the number of
messages into which an all-reduce cuts the gradients, and codec = the bytes that compressing reads and writes, over the
speed of its kernel. A step that overlaps with t takes t_f + t_b + max(0, seconds − t). How much of the overlap a real
system gets is not for such a model to say, and so it draws a band: from none of it (the slower end) to all of it.

What is drawn beside it was read off the charts of others: Bagua's page of benchmarks (VGG16, 16 × 8 V100, 100 and
10 Gb/s, batch 32) and BlueFog's performance page (ResNet-50, 16 × 8 V100, 25 Gb/s, batches of 64 and 32). The inputs of
the model are theirs too where they gave them (links, the nccl-tests bandwidth of 100 Gb/s TCP, 1.75 GB/s for NCCL and
2.8 GB/s with bagua-net), and otherwise the throughput of a rank alone, and for BlueFog one number fitted to Horovod's
bars: α = 120 µs. Nothing is fitted to an algorithm of Bagua or BlueFog.

What comes out (the program prints it):

* The order is that of the charts wherever two bars differ by a fifth or more. 25 of 40 bars lie within their band, 36
  within 8 % of it.
* At 100 Gb/s DDP, all-reduce and QAdam lie at the end of no overlap, ByteGrad and decentralized between: what a system
  of 2020 hid behind its backward pass was little. Low-precision decentralized is 13 % slower than wire and kernels
  explain: Bagua's is one bucket, compressed as a whole after the step.
* At 10 Gb/s ByteGrad, QAdam and low-precision decentralized are published 1.40, 1.27 and 1.56 times *faster* than the
  band's better end. ByteGrad's 2 · 15/16 · 141 MB alone take 0.21 s at 1.25 GB/s, and its whole step is published as
  0.21 s, of which forward is 0.05 s. Its ratio to DDP is theirs 4.3, ours 2.7 to 3.2. A limit that lets bursts
  pass, or one above its name, would explain it; the page does not say how the rate was limited.
* BlueFog's one-peer bars lie within their bands and nearly flat, as the model has them; Horovod's fall with the number
  of GPUs by its latency, which is the number that was fitted.
"""
