"""The papers' mathematics on arrays: no Flax, no config.

The name of an array ends in the letters of its dimensions; a scalar has none:

    B batch             L length                    D model width       E expanded width (of a GAU's values)
    H heads             K width of a head           S shared query/key width of a GAU
    G chunks            C chunk length              W window            V vocabulary
    F random features   R chunks that a query sees  P logistics of a mixture
    N rows of any kind folded into one dimension, so that a matrix product has one batch dimension (on a CPU that is
      1.6 times as fast as two)
    I, J rows and columns of scores, in the kernels
    M keys, where their number differs from that of the queries L; in AFT the width of a head's keys, E or 1

In attention, K stands for the width of queries and keys and E for that of the values, whatever the family calls them.
"""
