"""Makes the tiny warm-start policy: a character tokenizer and a Llama of 0.80 M parameters that half knows `a+b=`.

Knows the recipe of the shipped files, which this makes again; does not know how they are used.

Supervised on sums of which half the answers are wrong, and stopped once sampling at temperature 1 is right about a
third of the time (greedy decoding: 0.9), in about two minutes: reinforcement learning has something to lift. The
training pairs include those that `data=arithmetic` holds out, so the start is equally good on both.

    python -m asynctensorrlhf.warm_start.make_tiny_llama --out FOLDER
"""

from __future__ import annotations

import argparse
import logging
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 256
TRAIN_COLUMNS = 11  # "NN+NN=" is 6, the answer at most 3, EOS 1
MAX_NEW_TOKENS = 6
NUM_STEPS = 1000
ROWS_PER_STEP = 128
WARMUP_STEPS = 100
STEPS_PER_CHECK = 50
LEARNING_RATE = 3e-3
IGNORED_LABEL = -100
CHECK_SEED = 12345

logger = logging.getLogger(__name__)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character and newline; ids 0 to 3 are pad, bos, eos and unk."""
    tokens = ["<pad>", "<bos>", "<eos>", "<unk>", "\n", *(chr(code) for code in range(32, 127))]
    characters = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    # Only the text of the messages: conversational rows then tokenise like plain ones.
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Random weights, drawn from torch's global generator."""
    special_ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        **special_ids,
    )
    return LlamaForCausalLM(config)


def draw_problem(rng: random.Random) -> tuple[str, str]:
    """A sum and its answer; each operand has one or two digits with even chance."""
    a, b = (rng.randint(0, 9) if rng.random() < 0.5 else rng.randint(10, 99) for _ in range(2))
    return f"{a}+{b}=", str(a + b)


def corrupt(rng: random.Random, answer: str) -> str:
    """A plausible wrong answer: a little off, tens off, or one digit redrawn (which may leave it right)."""
    kind = rng.random()
    if kind < 0.4:
        wrong = int(answer) + rng.choice([-3, -2, -1, 1, 2, 3])
    elif kind < 0.7:
        wrong = int(answer) + rng.choice([-20, -10, 10, 20])
    else:
        digits = list(answer)
        place = rng.randrange(len(digits))
        digits[place] = str(rng.randint(0, 9))
        wrong = int("".join(digits))
    return str(max(wrong, 0))


def draw_rows(rng: random.Random, tokenizer: PreTrainedTokenizerFast, noise: float) -> tuple[Tensor, Tensor]:
    """One training batch.

    Args:
        rng: source of every draw.
        tokenizer: gives the ids.
        noise: share of wrong answers, in [0, 1].

    Returns:
        Ids and labels, each `(ROWS_PER_STEP, TRAIN_COLUMNS)`; labels only on the answer and its EOS.
    """
    vocab = tokenizer.get_vocab()
    ids = torch.full((ROWS_PER_STEP, TRAIN_COLUMNS), tokenizer.pad_token_id)
    labels = torch.full_like(ids, IGNORED_LABEL)
    for row in range(ROWS_PER_STEP):
        prompt, answer = draw_problem(rng)
        if rng.random() < noise:
            answer = corrupt(rng, answer)
        text = torch.tensor([vocab[character] for character in prompt + answer] + [tokenizer.eos_token_id])
        ids[row, : len(text)] = text
        labels[row, len(prompt) : len(text)] = text[len(prompt) :]
    return ids, labels


@torch.no_grad()
def measure_accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, num_draws: int, is_greedy: bool
) -> float:
    """Share of fixed problems answered exactly, sampled at temperature 1 or decoded greedily."""
    rng = random.Random(CHECK_SEED)
    problems = [draw_problem(rng) for _ in range(num_draws)]
    torch.manual_seed(CHECK_SEED)
    prompts = tokenizer([prompt for prompt, _ in problems], return_tensors="pt", padding=True, add_special_tokens=False)
    sampling = {} if is_greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    output = model.generate(
        input_ids=prompts["input_ids"],
        attention_mask=prompts["attention_mask"],
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=not is_greedy,
        **sampling,
    )
    completions = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text == answer for text, (_, answer) in zip(completions, problems, strict=True)) / num_draws


def accuracies(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_draws: int) -> tuple[float, float]:
    """Sampled and greedy accuracy, with dropout off."""
    model.eval()
    sampled = measure_accuracy(model, tokenizer, num_draws=num_draws, is_greedy=False)
    greedy = measure_accuracy(model, tokenizer, num_draws=num_draws, is_greedy=True)
    model.train()
    return sampled, greedy


def pretrain(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    *,
    noise: float,
    stop_accuracy: float,
) -> None:
    """Supervised steps, in place, until sampled accuracy over 256 draws reaches `stop_accuracy`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(1, NUM_STEPS + 1):
        warmup, decay = min(1, step / WARMUP_STEPS), 0.1 + 0.9 * (1 - step / NUM_STEPS)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * warmup * decay
        ids, labels = draw_rows(rng, tokenizer, noise)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % STEPS_PER_CHECK == 0:
            sampled, greedy = accuracies(model, tokenizer, num_draws=256)
            logger.info("step %d: loss %.3f, sampled %.3f, greedy %.3f", step, loss.item(), sampled, greedy)
            if sampled >= stop_accuracy:
                return


def main(argv: Sequence[str] | None = None) -> None:
    """Make the model and save it; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=0.5, help="share of wrong answers, in [0, 1]")
    parser.add_argument("--stop-accuracy", type=float, default=0.33, help="sampled accuracy that ends training")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; the last bits of the weights depend on it")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    rng = random.Random(options.seed)
    pretrain(model, tokenizer, rng, noise=options.noise, stop_accuracy=options.stop_accuracy)
    sampled, greedy = accuracies(model, tokenizer, num_draws=1024)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    logger.info("%s: over 1,024 draws sampled %.3f, greedy %.3f", options.out, sampled, greedy)


if __name__ == "__main__":
    main()
