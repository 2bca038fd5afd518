import torch

from asynctensorrlhf.rollout.sampling import draw_uniforms, in_single_precision, sample_tokens


def test_uniforms_of_a_sample_depend_on_seed_group_and_index_only():
    few, many = draw_uniforms(3, 11, 2, 5), draw_uniforms(3, 11, 8, 5)
    assert torch.equal(few, many[:2])
    assert not torch.equal(many[0], many[1])
    assert not torch.equal(few, draw_uniforms(3, 12, 2, 5))
    assert not torch.equal(few, draw_uniforms(4, 11, 2, 5))


def test_tokens_are_drawn_with_their_tempered_probabilities():
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0]]).expand(40_000, -1)
    uniforms = draw_uniforms(0, 0, 40_000, 1).squeeze(1)
    ids, logprobs = sample_tokens(logits, uniforms, temperature=0.7, num_token_ids=4)
    expected = torch.softmax(logits[0] / 0.7, dim=-1)
    torch.testing.assert_close(torch.bincount(ids, minlength=4) / 40_000, expected, rtol=0, atol=0.01)
    torch.testing.assert_close(logprobs.exp(), expected[ids])


def test_a_token_without_probability_is_never_drawn_at_the_ends_of_the_unit_interval():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(2, -1)
    uniforms = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    ids, _ = sample_tokens(logits, uniforms, temperature=1.0, num_token_ids=5)
    assert ids.tolist() == [1, 3]


def test_ids_beyond_the_tokenizer_are_not_drawn_even_when_they_are_most_likely():
    logits = torch.tensor([[0.0, 0.0, 50.0]])
    uniforms = torch.tensor([0.9], dtype=torch.float64)
    sampled, logprobs = sample_tokens(logits, uniforms, temperature=1.0, num_token_ids=2)
    greedy, _ = sample_tokens(logits, None, temperature=1.0, num_token_ids=2)
    assert sampled.item() == 1
    assert greedy.item() == 0
    torch.testing.assert_close(logprobs, torch.tensor([0.5]).log())


def test_uniforms_in_single_precision_stay_below_one_and_draw_no_impossible_token():
    uniforms = in_single_precision(torch.tensor([[0.0, 1.0 - 2**-53]], dtype=torch.float64))
    assert uniforms.max() < 1
    logits = torch.tensor([[-torch.inf, 0.3, -torch.inf, 0.1, -torch.inf]]).expand(2, -1)
    ids, _ = sample_tokens(logits, uniforms[0], temperature=1.0, num_token_ids=5)
    assert ids.tolist() == [1, 3]
