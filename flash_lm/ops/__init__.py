"""The papers' mathematics on arrays: no Flax, no config.

The name of an array ends in the letters of its dimensions; a scalar has none:

    B batch             L length                    D model width       E expanded width (of a GAU's values)
    H heads             K width of a head           S shared query/key width of a GAU
    G chunks            C chunk length              W window, or taps   V vocabulary
    F random features   R chunks that a query sees  P logistics of a mixture
    N rows of any kind, folded into one dimension so that a matrix product has one batch dimension (on a CPU this is
      1.6 times as fast as two)
    I, J rows and columns of scores, in the kernels
    M keys, if their number differs from the number L of queries; in AFT the width of a head's keys, E or 1

In attention, K is the width of queries and keys and E that of the values, whatever the family calls them.
"""
