"""A transformers model in a TrainStep: loss and gradients of one device, whatever labels are padding."""

import copy
import warnings

import pytest
import torch
from torch import nn

import mgpu_core

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
transformers.logging.set_verbosity_error()

from mgpu_core.integrations.transformers import WeightedLoss  # noqa: E402

SMALL = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT = {**SMALL, "intermediate_size": 16, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "num_labels": 3}
GPT2 = {"vocab_size": 31, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
T5 = {"vocab_size": 31, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
MODELS = {
    "GPT2LMHeadModel": transformers.GPT2Config(**GPT2, **NO_DROPOUT),
    "LlamaForCausalLM": transformers.LlamaConfig(**SMALL, intermediate_size=16),
    "BertForMaskedLM": transformers.BertConfig(**BERT),
    "BertForTokenClassification": transformers.BertConfig(**BERT),
    "BertForSequenceClassification": transformers.BertConfig(**BERT),
    "T5ForConditionalGeneration": transformers.T5Config(**T5, decoder_start_token_id=0),
}
LENGTHS = (0, 0, 0, 0, 9, 3, 12)  # labels of each row, of 12: the first rank has none


def made(name):
    torch.manual_seed(0)
    return getattr(transformers, name)(MODELS[name]).train()


def batch_of(name, seed=1):
    ids = torch.randint(1, 31, (7, 12), generator=torch.Generator().manual_seed(seed))
    if name == "BertForSequenceClassification":
        labels = ids[:, 0] % 3
    else:
        labels = ids % 3 if name == "BertForTokenClassification" else ids.clone()
        for row, length in enumerate(LENGTHS):
            labels[row, length:] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def gradients_of(model, batches, dtype=None):
    """Return loss and gradients of a single device; of several batches the mean over all their labels."""
    model = copy.deepcopy(model)
    helper, losses, labels = WeightedLoss(model), [], []
    for batch in batches:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(**batch).loss
            _, count = helper(**batch)
        losses.append(loss * count)
        labels.append(count)
    loss = sum(losses) / sum(labels)
    loss.backward()
    return float(loss.detach()), [each.grad for each in model.parameters() if each.grad is not None]


def trained(model, batches, ranks, **options):
    """Return the last loss and the gradients of a step, from parameters that plain SGD has moved by them."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    before = [each.detach().clone() for each in parameters]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    step = mgpu_core.TrainStep(
        WeightedLoss(model), None, optimizer, ["cpu"] * ranks, reduction="weighted", accumulate=len(batches), **options
    )
    for batch in batches:
        loss = step(**batch)
    return float(loss), [old - new.detach() for old, new in zip(before, parameters, strict=True)]


def assert_same(found, expected, tolerance=1e-5):
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    used = [each for each in found[1] if bool(each.any())]
    expected_norm = float(torch.stack([each.norm() for each in expected[1]]).norm())
    assert float(torch.stack([each.norm() for each in used]).norm()) == pytest.approx(expected_norm, rel=tolerance)
    for mine, theirs in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance * expected_norm, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_one_device(name, ranks):
    model, batch = made(name), batch_of(name)
    expected = gradients_of(model, [batch])
    assert expected[0] == pytest.approx(float(model(**batch).loss))
    assert_same(trained(model, [batch], ranks), expected)


@pytest.mark.parametrize("name", MODELS)
def test_accumulated_batches_count_their_labels(name):
    model = made(name)
    batches = [batch_of(name), {key: each[2:6] for key, each in batch_of(name, 2).items()}]
    parameters = list(model.parameters())
    assert len(parameters) == len(gradients_of(model, batches)[1])
    _, found = trained(copy.deepcopy(model), batches, 2)
    loss, expected = gradients_of(model, batches)
    assert_same((loss, found), (loss, expected))


@pytest.mark.several_ranks
@pytest.mark.parametrize(
    "name", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration"]
)
def test_bfloat16(name, ranks):
    model, batch = made(name), batch_of(name)
    expected = gradients_of(model, [batch], torch.bfloat16)
    assert_same(trained(model, [batch], ranks, amp_dtype=torch.bfloat16), expected, 3e-2)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "name", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration"]
)
def test_gradient_checkpointing(name, reentrant):
    model, batch = made(name), batch_of(name)
    expected = gradients_of(model, [batch])
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(trained(model, [batch], 2), expected)


@pytest.mark.several_ranks
@pytest.mark.parametrize(
    "name", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration"]
)
def test_lora(name, ranks):
    model, batch = made(name).double(), batch_of(name)
    targets = {"GPT2": "c_attn", "Llam": "q_proj", "Bert": "query", "T5Fo": "q"}[name[:4]]
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=[targets], r=2))
    for each in model.parameters():
        if each.requires_grad:
            nn.init.normal_(each, std=0.1)
    expected = gradients_of(model, [batch])
    assert_same(trained(model, [batch], ranks), expected)


@pytest.mark.several_ranks
@pytest.mark.parametrize("name", MODELS)
def test_in_data_parallel_sums_and_numbers_are_added(name, ranks):
    model, batch = made(name), batch_of(name)
    expected = gradients_of(model, [batch])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scalars of the ranks become a vector
        sums, counts = mgpu_core.DataParallel(WeightedLoss(model), ["cpu"] * ranks)(**batch)
    loss = sums.sum() / counts.sum()
    loss.backward()
    assert_same((float(loss.detach()), [each.grad for each in model.parameters() if each.grad is not None]), expected)


def warnings_of(model, batch, ranks=2, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mgpu_core.TrainStep(model, None, optimizer, ["cpu"] * ranks, **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            step(**batch)
    return [str(each.message) for each in told if "labels other than -100" in str(each.message)]


@pytest.mark.parametrize("name", [name for name in MODELS if "Sequence" not in name])
def test_without_the_helper_the_counts_are_told_once(name):
    batch = {key: each[3:] for key, each in batch_of(name).items()}  # labels of 0, 9 | 3, 12
    (text,) = warnings_of(made(name), batch)
    shifts = name in ("GPT2LMHeadModel", "LlamaForCausalLM")
    assert text.startswith(f"the ranks have {'8, 13' if shifts else '9, 15'} labels other than -100 in 2, 2 rows")
    assert "WeightedLoss(model)" in text


def test_labels_by_position_are_counted_too():
    class Own(nn.Linear):
        def forward(self, x, labels):
            return nn.functional.cross_entropy(super().forward(x), labels)

    x, labels = torch.randn(4, 3), torch.tensor([-100, -100, 0, 1])
    step = mgpu_core.TrainStep(net := Own(3, 2), None, torch.optim.SGD(net.parameters(), 0.1), ["cpu"] * 2)
    with pytest.warns(UserWarning, match="the ranks have 0, 2 labels other than -100 in 2, 2 rows"):
        step(x, labels)


def test_the_first_label_of_a_row_does_not_count_where_the_loss_leaves_it_out():
    batch = batch_of("GPT2LMHeadModel")
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][:4, 0] = -100
    assert warnings_of(made("GPT2LMHeadModel"), batch) == []
    assert len(warnings_of(made("BertForMaskedLM"), batch)) == 1


def test_equal_shares_and_other_reductions_are_not_told_of():
    even = batch_of("GPT2LMHeadModel") | {"labels": batch_of("GPT2LMHeadModel")["input_ids"]}
    assert warnings_of(made("GPT2LMHeadModel"), even) == []
    assert warnings_of(made("BertForSequenceClassification"), batch_of("BertForSequenceClassification")) == []
    uneven = {key: each[3:] for key, each in batch_of("GPT2LMHeadModel").items()}
    assert warnings_of(made("GPT2LMHeadModel"), uneven, ranks=1) == []
    assert warnings_of(WeightedLoss(made("GPT2LMHeadModel")), uneven, reduction="weighted") == []


def test_what_the_helper_cannot_do_is_refused():
    with pytest.raises(ValueError, match="leave num_items_in_batch out"):
        WeightedLoss(made("GPT2LMHeadModel"))(**batch_of("GPT2LMHeadModel"), num_items_in_batch=5)
    with pytest.raises(ValueError, match="WeightedLoss needs labels="):
        WeightedLoss(made("GPT2LMHeadModel"))(input_ids=torch.ones(2, 3, dtype=torch.long))

    class Lossless(nn.Module):
        def forward(self, labels):
            return {"logits": labels}

    with pytest.raises(ValueError, match="Lossless returned no loss"):
        WeightedLoss(Lossless())(labels=torch.ones(2, dtype=torch.long))


def test_a_model_of_ones_own_counts_all_labels_and_may_say_otherwise():
    class Own(nn.Module):
        def forward(self, labels):
            return (labels.float().mean(),)

    labels = torch.ones(2, 5, dtype=torch.long)
    assert WeightedLoss(Own())(labels=labels)[1] == 10
    assert WeightedLoss(Own(), shifts=True)(labels=labels)[1] == 8
    assert WeightedLoss(Own())(labels=labels.float())[1] == 2  # no classes: a mean over rows


@pytest.mark.parametrize("kind", [torch.optim.AdamW, mgpu_core.optim.AdamW])
def test_a_batch_without_labels_is_that_of_one_device(kind, ranks):
    alone = made("LlamaForCausalLM")
    net = copy.deepcopy(alone)
    batch = batch_of("LlamaForCausalLM")
    empty = batch | {"labels": torch.full_like(batch["labels"], -100)}
    reference = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    step = mgpu_core.TrainStep(
        WeightedLoss(net), None, kind(net.parameters(), lr=1e-3), ["cpu"] * ranks, reduction="weighted"
    )
    for each in (batch, empty, batch):
        reference.zero_grad()
        expected = alone(**each).loss
        expected.backward()
        reference.step()
        torch.testing.assert_close(step(**each), expected.detach(), equal_nan=True)
    for mine, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)
