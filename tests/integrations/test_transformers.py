"""transformers' Trainer over several ranks: losses, norms and parameters are compared with those of one device."""

import sys
from functools import cache
from importlib import import_module

import pytest
import torch

from mgpu_core.support.extras import MissingExtra

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
transformers.logging.set_verbosity_error()

from mgpu_core.integrations.transformers import MultiGPUMixin, MultiGPUTrainer  # noqa: E402

SMALL = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT = {**SMALL, "intermediate_size": 16, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "num_labels": 3}
GPT2 = {"vocab_size": 30, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
T5 = {"vocab_size": 30, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
ROWS = 20  # in batches of 6, 6, 6, 2: the last has fewer rows than three ranks


def tokens():
    """Rows of eight tokens, and labels of which some rows have none."""
    ids = torch.randint(1, 30, (ROWS, 8), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for row in range(ROWS):
        labels[row, 3 * row % 8 :] = -100
    return ids, labels


IDS, LABELS = tokens()
OF_ROWS, OF_TOKENS = IDS[:, 0] % 3, torch.where(LABELS == -100, -100, LABELS % 3)
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)

# The first divides its loss by num_items_in_batch; the others take it, and average over their own items.
MODELS = {
    "GPT2LMHeadModel": (transformers.GPT2Config(**GPT2, **NO_DROPOUT), LABELS),
    "BertForTokenClassification": (transformers.BertConfig(**BERT), OF_TOKENS),
    "BertForSequenceClassification": (transformers.BertConfig(**BERT), OF_ROWS),
    "T5ForConditionalGeneration": (transformers.T5Config(**T5, dropout_rate=0, decoder_start_token_id=0), LABELS),
}


def made(name):
    torch.manual_seed(0)
    return getattr(transformers, name)(MODELS[name][0])


def rows_of(name):
    return [{"input_ids": ids, "labels": labels} for ids, labels in zip(IDS, MODELS[name][1], strict=True)]


def trainer(name, ranks, folder="unused", kind=None, model=None, arguments=transformers.TrainingArguments, **options):
    """A trainer of one device if ``ranks`` is 0, with the same rows in a batch."""
    rows = 6 // (ranks or 1)
    keys = ("per_device_train_batch_size", "per_device_eval_batch_size")
    custom = {key: options.pop(key) for key in ("compute_loss_func", "train_dataset") if key in options}
    usual = {"num_train_epochs": 1, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "use_cpu": True}
    own = {**usual, **options}
    quiet = {"report_to": [], "disable_tqdm": True}
    args = arguments(str(folder), **dict.fromkeys(keys, rows), **quiet, **own)
    kind = kind or (MultiGPUTrainer if ranks else transformers.Trainer)
    devices = {"device_ids": ["cpu" if own["use_cpu"] else "cuda:0"] * ranks} if ranks else {}
    data = {"train_dataset": rows_of(name), "eval_dataset": rows_of(name), **custom}
    return kind(model=model or made(name), args=args, **data, **devices)


def history(used):
    return [each[key] for each in used.state.log_history for key in ("loss", "grad_norm") if key in each]


def trained(name, ranks, **options):
    used = trainer(name, ranks, **options)
    used.train()
    return history(used), used.evaluate()["eval_loss"], list(used.model.parameters())


@cache
def on_one_device(name, accumulate):
    return trained(name, 0, gradient_accumulation_steps=accumulate)


def assert_alike(many, one):
    assert len(one[0]) >= 4
    assert many[0] == pytest.approx(one[0], rel=1e-5, abs=1e-5)
    assert many[1] == pytest.approx(one[1], abs=1e-4)
    for mine, theirs in zip(many[2], one[2], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("error:the ranks have")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_losses_norms_and_parameters_are_those_of_one_device(name, ranks, accumulate, capsys):
    many = trained(name, ranks, gradient_accumulation_steps=accumulate)
    assert_alike(many, on_one_device(name, accumulate))


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_bf16_is_computed_in(name, ranks, capsys):
    model, dtypes = made(name), set()
    model.lm_head.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    many = trained(name, ranks, model=model, bf16=True)
    assert dtypes == {torch.bfloat16}
    one = trained(name, 0, bf16=True)
    assert many[0] == pytest.approx(one[0], rel=2e-2)
    assert many[1] == pytest.approx(one[1], rel=2e-2)
    assert many[0] != pytest.approx(on_one_device(name, 1)[0], rel=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="transformers computes in float16 on GPUs alone")
def test_fp16_is_computed_in(capsys):
    model, dtypes = made("GPT2LMHeadModel"), set()
    model.lm_head.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    many = trained("GPT2LMHeadModel", 2, model=model, fp16=True, use_cpu=False)
    assert dtypes == {torch.float16}
    one = trained("GPT2LMHeadModel", 0, fp16=True, use_cpu=False)
    assert many[0] == pytest.approx(one[0], rel=2e-2)
    assert many[1] == pytest.approx(one[1], rel=2e-2)


LLAMA = transformers.LlamaConfig(**SMALL, intermediate_size=16)
MODELS_OF_DECODERS = {"GPT2LMHeadModel": "c_attn", "LlamaForCausalLM": "q_proj", "T5ForConditionalGeneration": "q"}


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.several_ranks
@pytest.mark.parametrize("name", MODELS_OF_DECODERS)
def test_adapters_and_checkpointing(name, ranks, reentrant, capsys, monkeypatch):
    peft = pytest.importorskip("peft")
    monkeypatch.setitem(MODELS, "LlamaForCausalLM", (LLAMA, LABELS))
    options = {"gradient_accumulation_steps": 2}
    if reentrant is not None:
        options |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}

    def adapted():
        model = made(name)
        if reentrant is None:
            torch.manual_seed(1)
            settings = peft.LoraConfig(target_modules=[MODELS_OF_DECODERS[name]], r=2, init_lora_weights=False)
            model = peft.get_peft_model(model, settings)
        return model

    assert_alike(trained(name, ranks, model=adapted(), **options), trained(name, 0, model=adapted(), **options))


def batches_with_no_label():
    """Six rows, of which the last two have no label: with two rows in a batch, a batch of one device has none."""
    same = {"input_ids": torch.arange(1, 7), "labels": torch.arange(1, 7)}
    return [same] * 4 + [{**same, "labels": torch.full((6,), -100)}] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_batch_of_evaluation_without_any_label_is_left_out_of_the_mean(ranks, capsys):
    def loss(ranks):
        used = trainer("GPT2LMHeadModel", ranks)
        used.args.per_device_eval_batch_size = 2 // (ranks or 1)
        return used.evaluate(batches_with_no_label())["eval_loss"]

    assert loss(ranks) == pytest.approx(loss(0), rel=1e-6)
    assert loss(0) > 1


def own_loss(kind):
    class Own(kind):
        """Its loss is the model's own, which it does not tell how many labels there are."""

        def compute_loss(self, model, inputs, return_outputs=False, **_):
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    return Own


@pytest.mark.several_ranks
@pytest.mark.parametrize("name", MODELS)
def test_an_own_compute_loss(name, ranks, capsys):
    many = trained(name, ranks, kind=own_loss(MultiGPUTrainer))
    assert_alike(many, trained(name, 0, kind=own_loss(transformers.Trainer)))


def test_each_rank_gets_its_part_of_the_rows(capsys):
    model, seen = made("GPT2LMHeadModel"), []
    model.register_forward_pre_hook(lambda module, args, given: seen.append(len(given["input_ids"])), with_kwargs=True)
    used = trainer("GPT2LMHeadModel", 3, model=model)
    assert (used.args.n_gpu, used.args.train_batch_size) == (3, 6)
    used.train()
    assert sorted(seen) == sorted(3 * [2, 2, 2] + [1, 1])


@pytest.mark.parametrize("options", [{}, {"return_dict": False}, {"shift_labels": True}, {"num_items_in_batch": None}])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForTokenClassification"])
def test_ranks_with_no_item_or_one(name, options):
    """Labels of three rows, of which the first has no item, the second one, and the last all."""
    model = made(name)
    labels = IDS[:3] % 3
    labels[0], labels[1, 2:], labels[1, 0] = -100, -100, -100
    given = {"input_ids": IDS[:3], "labels": labels, "num_items_in_batch": torch.tensor(20.0), **options}
    if "shift_labels" in options:
        shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
        given["shift_labels"] = shifted if name.startswith("GPT2") else labels
    wrapped, found = trainer(name, 3, model=model)._wrap_model(model), []
    wrapped._shifts = name.startswith("GPT2")
    for each in (wrapped, model):
        model.zero_grad()
        loss = each(**given)[0]
        loss.backward()
        grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        with torch.no_grad():
            items = labels[:, 1:] if wrapped._shifts else labels
            found.append([loss.detach(), each(**{**given, "num_items_in_batch": items.ne(-100).sum()})[0], *grads])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)


def other_loss(outputs, labels, num_items_in_batch):
    """A loss that compares rows with each other, so that only all logits together give it."""
    scores = outputs.logits.mean(1)
    return torch.nn.functional.cross_entropy(scores @ scores.T, torch.arange(len(scores))) / num_items_in_batch


@pytest.mark.parametrize("options", [{"compute_loss_func": other_loss}, {"label_smoothing_factor": 0.1}])
def test_losses_of_the_trainer_are_computed_once(options, capsys):
    many, one = (trained("GPT2LMHeadModel", ranks, **options) for ranks in (3, 0))
    assert_alike(many, one)


def test_the_mixin_serves_other_trainers(capsys):
    class Own(MultiGPUMixin, transformers.Seq2SeqTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            shapes.append((loss.shape, len(outputs.logits)))
            return (loss, outputs) if return_outputs else loss

    shapes = []
    used = trainer("T5ForConditionalGeneration", 2, kind=Own, arguments=transformers.Seq2SeqTrainingArguments)
    used.train()
    assert shapes == [((), 6), ((), 6), ((), 6), ((), 2)]
    assert history(used) == pytest.approx(on_one_device("T5ForConditionalGeneration", 1)[0], rel=1e-5, abs=1e-5)


def test_predictions_have_all_rows_in_order(capsys):
    name = "BertForSequenceClassification"
    many, one = (trainer(name, ranks).predict(rows_of(name)) for ranks in (3, 0))
    torch.testing.assert_close(*(torch.as_tensor(each.predictions) for each in (many, one)))
    assert many.metrics["test_loss"] == pytest.approx(one.metrics["test_loss"], abs=1e-6)


def test_checkpoints_load_with_and_without_ranks(tmp_path, capsys):
    """The second of two epochs on other ranks goes on as on one device."""
    name = "GPT2LMHeadModel"
    whole = trained(name, 0, num_train_epochs=2)[0]
    for number, (first, second) in enumerate([(0, 3), (3, 0), (2, 3)]):
        folder = tmp_path / str(number)
        used = trainer(name, first, folder, save_strategy="epoch", num_train_epochs=2)
        used.train()
        found = transformers.AutoModelForCausalLM.from_pretrained(folder / "checkpoint-4")
        assert list(found.state_dict()) == list(made(name).state_dict())
        resumed = trainer(name, second, folder, num_train_epochs=2)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
        assert history(resumed) == pytest.approx(whole, rel=1e-5, abs=1e-5)


def test_a_failure_in_a_rank_names_it(capsys):
    name = "BertForSequenceClassification"
    data = [{**row, "labels": torch.tensor(7)} if number > 15 else row for number, row in enumerate(rows_of(name))]
    with pytest.raises(IndexError, match=r"in replica \d on device cpu"):
        trainer(name, 3, train_dataset=data).train()


def test_devices_that_do_not_fit():
    with pytest.raises(ValueError, match="does not exist"):
        MultiGPUTrainer(device_ids=["cuda:99"])
    with pytest.raises(TypeError, match="list with one entry per rank"):
        MultiGPUTrainer(device_ids="cpu")


def test_without_devices_it_is_the_plain_trainer(monkeypatch, capsys):
    monkeypatch.delenv("MGPU_CORE_CPU_RANKS", raising=False)
    used = trainer("GPT2LMHeadModel", 0, kind=MultiGPUTrainer)
    assert used._wrap_model(used.model) is used.model
    monkeypatch.setenv("MGPU_CORE_CPU_RANKS", "2")
    used = trainer("GPT2LMHeadModel", 0, kind=MultiGPUTrainer)
    assert len(used._wrap_model(used.model).device_ids) == 2


def test_a_missing_transformers_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "mgpu_core.integrations.transformers")
    with pytest.raises(MissingExtra, match=r"needs transformers: pip install 'mgpu-core\[transformers\]'"):
        import_module("mgpu_core.integrations.transformers")
