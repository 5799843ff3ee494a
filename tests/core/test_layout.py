"""Cutting rows out of a padded batch, and putting back what was computed on them."""

import itertools
import random

import pytest
import torch

from trl_stppo.core.layout import cut_rows, group_rows, put_back, row_spans, tail_width

INF = float("inf")
# Two rows: [prompt on the right | completion on the left], 0 where padded.
IDS = torch.tensor([[0, 0, 5, 6, 7, 0], [1, 2, 3, 4, 0, 0]])
MASK = (IDS > 0).long()


def test_spans_by_hand():
    start, length = row_spans(MASK)
    assert start.tolist() == [2, 0]
    assert length.tolist() == [3, 4]


def test_a_gap_inside_a_row_stays_a_gap():
    mask = torch.tensor([[0, 1, 0, 1, 0]])
    start, length = row_spans(mask)
    part = cut_rows(torch.arange(5)[None], mask, torch.tensor([0]), 3, start, length)
    assert part.input_ids.tolist() == [[1, 2, 3]]
    assert part.attention_mask.tolist() == [[1, 0, 1]]


def test_a_row_without_any_token_still_attends_to_one():
    start, length = row_spans(torch.zeros(1, 4))
    assert (start.item(), length.item()) == (0, 1)
    part = cut_rows(torch.ones(1, 4).long(), torch.zeros(1, 4), torch.tensor([0]), 2, start, length)
    assert part.attention_mask.tolist() == [[1, 0]]


def test_cut_and_put_back_by_hand():
    start, length = row_spans(MASK)
    part = cut_rows(IDS, MASK, torch.tensor([1, 0]), 4, start, length)
    assert part.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 0]]
    assert part.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    # The completion is columns 3, 4 and 5. The row that starts at 2 has it from its column 1 on.
    assert tail_width(part, 6, 3) == 3
    tail = torch.tensor([[20.0, 30.0, 40.0], [60.0, 70.0, 999.0]])
    assert put_back([part], [tail], 6, 3).tolist() == [[60.0, 70.0, 0.0], [40.0, 0.0, 0.0]]


def test_a_row_that_ends_with_the_batch_is_padded_with_what_does_not_count():
    ids, mask = torch.tensor([[0, 8, 9], [1, 2, 3]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    part = cut_rows(ids, mask, torch.tensor([0, 1]), 3, *row_spans(mask))
    assert part.attention_mask.tolist() == [[1, 1, 0], [1, 1, 1]]


def test_what_lies_before_a_row_is_zero():
    """A row without a prompt has no state before its first token."""
    ids, mask = torch.tensor([[0, 8, 9]]), torch.tensor([[0, 1, 1]])
    part = cut_rows(ids, mask, torch.tensor([0]), 2, *row_spans(mask))
    assert tail_width(part, 3, 3) == 2
    assert put_back([part], [torch.tensor([[5.0, 6.0]])], 3, 3).tolist() == [[0.0, 5.0, 6.0]]


def cost(groups, lengths, overhead):
    return sum(len(g) * max(lengths[i] for i in g) + overhead for g in groups)


def every_grouping(rows):
    """All ways to cut a list into consecutive pieces."""
    for cuts in itertools.product([False, True], repeat=len(rows) - 1):
        groups = [[rows[0]]]
        for row, cut in zip(rows[1:], cuts, strict=True):
            groups.append([row]) if cut else groups[-1].append(row)
        yield groups


@pytest.mark.parametrize("overhead", [0, 3, 50])
@pytest.mark.parametrize("max_rows", [None, 1, 2, 4])
def test_no_grouping_is_cheaper(overhead, max_rows):
    draw = random.Random(overhead)
    for _ in range(20):
        lengths = [draw.randint(1, 30) for _ in range(draw.randint(1, 8))]
        groups = group_rows(lengths, max_rows=max_rows, overhead=overhead)
        assert sorted(i for g in groups for i in g) == list(range(len(lengths)))
        assert max(map(len, groups)) <= (max_rows or len(lengths))
        ordered = sorted(range(len(lengths)), key=lengths.__getitem__)
        allowed = [
            cost(option, lengths, overhead)
            for option in every_grouping(ordered)
            if max(map(len, option)) <= (max_rows or len(lengths))
        ]
        assert cost(groups, lengths, overhead) == min(allowed)


def test_grouping_by_hand():
    assert group_rows([9, 1, 10, 2], overhead=4) == [[1, 3], [0, 2]]
    assert group_rows([9, 1, 10, 2], overhead=100) == [[1, 3, 0, 2]]
    assert group_rows([9, 1, 10, 2], overhead=0) == [[1], [3], [0], [2]]
    assert group_rows([9, 1, 10, 2], overhead=INF, max_rows=3) == [[1, 3, 0], [2]]
    assert group_rows([5, 5, 5]) == [[0, 1, 2]]
    assert group_rows([]) == []


def padded_batch(draw, rows, prompts, completions):
    """Rows of random lengths as a rollout batch holds them, and what each holds itself."""
    own = []
    ids = torch.zeros(rows, prompts + completions, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row in range(rows):
        before, after = draw.randint(1, prompts), draw.randint(0, completions)
        tokens = [draw.randint(1, 99) for _ in range(before + after)]
        ids[row, prompts - before : prompts + after] = torch.tensor(tokens)
        mask[row, prompts - before : prompts + after] = 1
        own.append((before, tokens))
    return ids, mask, own


@pytest.mark.parametrize("extra", [0, 1], ids=["tokens", "states"])
@pytest.mark.parametrize("overhead", [0, 5, INF])
def test_a_function_of_the_prefix_survives_the_round_trip(overhead, extra):
    """Against a loop over single rows: a running sum that padding on the left would change."""
    draw = random.Random(7)
    for _ in range(30):
        rows, prompts, completions = draw.randint(1, 6), draw.randint(1, 5), draw.randint(1, 7)
        ids, mask, own = padded_batch(draw, rows, prompts, completions)
        start, length = row_spans(mask)
        parts, tails = [], []
        for group in group_rows(length.tolist(), max_rows=3, overhead=overhead):
            width = max(int(length[i]) for i in group) + draw.randint(0, 2)
            part = cut_rows(ids, mask, torch.tensor(group), width, start, length)
            place = torch.arange(width)
            running = (part.input_ids * part.attention_mask * (1 + place)).cumsum(1).double()
            parts.append(part)
            tails.append(running[:, -tail_width(part, ids.size(1), completions + extra) :])
        got = put_back(parts, tails, ids.size(1), completions + extra)
        for row, (before, tokens) in enumerate(own):
            for column in range(completions + extra):
                end = before - extra + column + 1
                sum_so_far = sum((i + 1) * t for i, t in enumerate(tokens[:end]))
                assert got[row, column] == (sum_so_far if end <= len(tokens) else 0.0)


def test_gradients_are_zero_at_padding_and_reach_everything_else_once():
    start, length = row_spans(MASK)
    part = cut_rows(IDS, MASK, torch.tensor([0, 1]), 4, start, length)
    tail = torch.full((2, 3), float("nan"))
    tail[0, :2], tail[1, 2] = 1.0, 1.0
    tail.requires_grad_()
    put_back([part], [tail], 6, 3).sum().backward()
    assert tail.grad.tolist() == [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
