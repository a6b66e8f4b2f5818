"""The planner beyond one machine: beside what others published, and up to 1,024 nodes.

    python -m bench.scaling [--measured FILE] [--out FOLDER]

Steps are those that `bk.tune.predict` predicts, from the costs that each stage declares: there is no other model here.
`--measured` takes what `bk.tune.probe` found on a cluster (`Network.to_json()`), in place of assumed numbers.

A message of b bytes takes α + b/β. Nodes of g GPUs share one network interface; there are m nodes and n = m g ranks.
The planner says how much of an exchange a backward pass hides, from the times at which gradients are ready. How much of
that a real system of others got is not known, and so figures show a band: from none of the overlap that the window of
the algorithm allows (the slower end) to all of it.

What is drawn beside it was read off the charts of others: Bagua's page of benchmarks (VGG16, 16 × 8 V100, 100 and
10 Gb/s, batch 32) and BlueFog's performance page (ResNet-50, 16 × 8 V100, 25 Gb/s, batches of 64 and 32). The inputs of
the planner are theirs too where they gave them (links, the nccl-tests bandwidth of 100 Gb/s TCP, 1.75 GB/s for NCCL and
2.8 GB/s with bagua-net), and otherwise the throughput of a rank alone, and for BlueFog one number fitted to Horovod's
bars: α = 120 µs. Nothing is fitted to an algorithm of Bagua or BlueFog. The leader of a node compresses and sends for
all of it in Bagua; here each rank has a shard, with an eighth of the leader's speeds.

What comes out (the program prints it):

* The order is that of the charts wherever two bars differ by a fifth or more. 25 of 40 bars lie within their band, 36
  within 8 % of it.
* At 100 Gb/s DDP, all-reduce and QAdam lie at the end of no overlap, ByteGrad and decentralized between: what a system
  of 2020 hid behind its backward pass was little. Low-precision decentralized is 12 % slower than wire and kernels
  explain: Bagua's is one bucket, compressed as a whole after the step.
* At 10 Gb/s ByteGrad, QAdam and low-precision decentralized are published 1.40, 1.27 and 1.57 times *faster* than the
  band's better end: not reproduced. ByteGrad's 2 · 15/16 · 141 MB alone take 0.21 s at 1.25 GB/s, and its whole step is
  published as 0.21 s, of which forward is 0.05 s. Its ratio to DDP is theirs 4.3, ours 2.7 to 3.2. A limit that lets
  bursts pass, or one above its name, would explain it; the page does not say how the rate was limited.
* BlueFog's one-peer bars lie within their bands and nearly flat, as the planner has them; Horovod's fall with the
  number of GPUs by its latency, which is the number that was fitted.
"""
