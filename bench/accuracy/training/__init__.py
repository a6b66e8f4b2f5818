"""Trainings whose gradients are measured, and that show what a format costs.

tasks    a transformer, a network of matrices, and a table of embeddings
ways     each of them with gradients of two to eight bits, on two ranks
asked    each of them with an error instead of bits
"""
