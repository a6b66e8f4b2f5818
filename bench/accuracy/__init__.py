"""The accuracy of wire formats: error, bias and bits a value, and losses of trainings that use them.

    python -m bench.accuracy               errors and biases of all formats, in about ten minutes; then the page
    python -m bench.accuracy --training    trainings, for about an hour; a run that was interrupted goes on
    python -m bench.accuracy --page        only the page and its picture, from what has been measured

formats, references   those of `baguakit.compressors`; those of others, as their documents define them
sources, training     distributions, and gradients of trainings
measures              error, bias and kurtosis
claims, page, picture what the figures say, as sentences, tables and a picture
"""
