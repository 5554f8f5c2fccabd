"""Operations with a plain torch reference and a Triton kernel each. Imports without Triton and without a GPU."""
