"""The merge of a round: which coefficients, and the state they give."""
