"""Closed forms for what a mechanism returns when keys and values are random and nothing is trained.

One module per subject. Symbols, and the argument names that stand for them:

n         number of pairs written                    V         number of candidate values (`candidates`)
d_k, d_v  widths of a key and a value                m         age: pairs written after the one that is read
β         write strength (`beta`)                    γ         decay per step (`gamma`)

Keys and values are independent and uniform on the unit sphere unless a function states otherwise. A read-out is
o = Sᵀk for a stored key k, without the factor 1/√d_k. It is correct when, of all candidates, the value stored with k
has the largest cosine with o. Every function takes numbers or arrays that broadcast against each other.
"""
