"""Examples of nnsight's guide: a client's script, which runs each over the server and by itself.

`python nnsight_guide.py DIRECTORY FILE`, with NDIF_HOST set, writes what each saved, or its failure, to FILE.
"""

# ruff: noqa: RET504 - what a block saves comes back under its name

import inspect
import sys
import traceback

import nnsight
import torch
from nnsight import LanguageModel, TransformersModel
from nnsight.intervention.backends.remote import RemoteBackend
from nnsight.modeling import huggingface
from transformers import AutoTokenizer

PROMPT = "Ann has 3 boxes of 12 pens."
OTHER = "Tom has 4 bags of 7 apples and eats one."


def access(model, remote):
    with model.trace(PROMPT, remote=remote):
        hidden = model.model.layers[3].output.save()
        logits = model.lm_head.output.save()
        sums = (hidden.sum(-1) * 2).save()
    return hidden, logits, sums


def a_dict_of_the_script(model, remote):
    kept = {}
    with model.trace(PROMPT, remote=remote):
        kept["early"] = model.model.layers[1].output
        nnsight.save(kept)
    return kept


def edited_in_place(model, remote):
    with model.trace(PROMPT, remote=remote):
        before = model.model.layers[1].output.clone().save()
        model.model.layers[1].output[:, -1] = 0
        after = model.model.layers[1].output.save()
        logits = model.lm_head.output.save()
    return before, after, logits


def inputs(model, remote):
    with model.trace(PROMPT, remote=remote):
        whole = model.model.layers[2].self_attn.inputs.save()
        first = model.model.layers[2].mlp.input.save()
        model.model.layers[4].mlp.input = first
        logits = model.lm_head.output.save()
    return first, whole[1]["hidden_states"], logits


def values_between_invokers(model, remote):
    with model.trace(remote=remote) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(PROMPT):
            embeddings = model.model.embed_tokens.output
            barrier()
        with tracer.invoke("_ _ _ _ _ _ _"):
            barrier()
            model.model.embed_tokens.output[:, -3:] = embeddings[:, -3:]
            patched = model.lm_head.output[:, -1].save()
    return patched


def an_invoker_without_a_prompt(model, remote):
    with model.trace(remote=remote) as tracer:
        with tracer.invoke(PROMPT):
            one = model.lm_head.output[:, -1].save()
        with tracer.invoke(OTHER):
            two = model.lm_head.output[:, -1].save()
        with tracer.invoke():
            both = model.lm_head.output[:, -1].save()
    return one, two, both


def generation_step_by_step(model, remote):
    with model.generate(PROMPT, max_new_tokens=4, do_sample=False, remote=remote) as tracer:
        hidden = nnsight.save([])
        for _ in tracer.iter[1:3]:
            hidden.append(model.model.layers[-1].output[:, -1])
        ids = tracer.result.save()
    return hidden, ids


def generation_every_step(model, remote):
    with model.generate(PROMPT, max_new_tokens=4, do_sample=False, remote=remote) as tracer:
        tokens = nnsight.save([])
        for _ in tracer.all():
            model.model.layers[0].output[:] += 0.1
            tokens.append(model.lm_head.output[0, -1].argmax())
    return tokens


def stopping_early(model, remote):
    with model.trace(PROMPT, remote=remote) as tracer:
        hidden = model.model.layers[1].output.save()
        tracer.stop()
    return hidden


def edited_gradients(model, remote):
    with model.trace(PROMPT, remote=remote):
        early, late = model.model.layers[1].output, model.model.layers[4].output
        loss = model.lm_head.output[:, -1].sum()
        with loss.backward():
            late.grad = late.grad * 0.5
            grad = early.grad.save()
    return grad


def editing(model, remote):
    with model.edit() as (_, edited):
        edited.model.layers[1].output[:] = 0
    with edited.trace(PROMPT, remote=remote):
        changed = edited.lm_head.output.save()
    with model.trace(PROMPT, remote=remote):
        plain = model.lm_head.output.save()
    return changed, plain


def scanning(model, remote):
    backend = RemoteBackend(model.to_model_key()) if remote else None
    with model.scan(PROMPT, backend=backend):
        shape = nnsight.save(tuple(model.model.layers[2].output.shape))
    return shape


def caching_chosen_modules_and_inputs(model, remote):
    with model.trace(PROMPT, remote=remote) as tracer:
        cache = tracer.cache(modules=[model.model.layers[1].mlp], include_inputs=True)
        model.model.layers[0].output[:] = 0
    return len(cache.keys()), cache["model.model.layers.1.mlp"].output, cache["model.model.layers.1.mlp"].input


def source_tracing(model, remote):
    with model.trace(PROMPT, remote=remote):
        activated = model.model.layers[1].mlp.source.self_act_fn_0.output.save()
        model.model.layers[3].mlp.source.self_down_proj_0.output[:] = 0
        logits = model.lm_head.output.save()
    return activated, logits


def skipping(model, remote):
    with model.trace(PROMPT, remote=remote):
        model.model.layers[2].skip(model.model.layers[1].output)
        logits = model.lm_head.output.save()
    return logits


def sessions(model, remote):
    with model.session(remote=remote):
        with model.trace(PROMPT):
            clean = model.model.layers[2].output[:, -1]
        with model.trace(OTHER):
            model.model.layers[2].output[:, -1] = clean
            logits = model.lm_head.output[:, -1].save()
    return logits


def renaming(model, remote):
    renamed = made(model, rename={"model.layers": "blocks", "self_attn": "attention"})
    with renamed.trace(PROMPT, remote=remote):
        out = renamed.blocks[2].attention.output[0].save()
    return out


def functions_of_the_script(model, remote):
    with model.trace(PROMPT, remote=remote):
        value = normed(model.model.layers[1].output).save()
    return value


def normed(value):
    return value / value.norm(dim=-1, keepdim=True)


def weights_changed_by_a_block(model, remote):
    """What a block does to the weights stays its own: another section sees them as they are."""
    with model.trace(PROMPT, remote=remote):
        model.lm_head.weight.data.zero_()
        logits = model.lm_head.output.abs().max().save()
    if not remote:
        model.lm_head.weight.data.copy_(model._module.model.embed_tokens.weight.data)  # as it was
    return logits


def an_older_name(model, remote):
    old = made(model, LanguageModel)
    with old.trace(PROMPT, remote=remote):
        logits = old.lm_head.output.save()
    return logits


# ---- mistakes and a form of nnsight 0.5, and what a client gets for them


def error_of_next(model, remote):
    with model.generate(PROMPT, max_new_tokens=3, remote=remote):
        first = model.model.layers[0].output.save()
        second = model.model.layers[0].next().output.save()
    return first, second


def error_of_a_block(model, remote):
    with model.trace(PROMPT, remote=remote):
        hidden = model.model.layers[1].output
        wrong = hidden @ hidden  # 13 tokens by 192
        wrong.save()


def error_of_a_wrong_layer(model, remote):
    with model.trace(PROMPT, remote=remote):
        model.model.layers[99].output.save()


def made(model, kind=TransformersModel, **options):
    """Another view of the same checkpoint, with its weights only where the first has them."""
    path = model.repo_id
    tokenizer = AutoTokenizer.from_pretrained(path)
    task = {} if kind is LanguageModel else {"task": "text-generation"}
    return kind(path, tokenizer=tokenizer, dispatch=model.dispatched, **task, **options)


def outcome(section, model, remote):
    try:
        return {"value": section(model, remote)}
    except Exception as error:  # noqa: BLE001 - the tests look at it
        return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}


def main(path, to):
    huggingface._ID_CACHE[path] = path  # else nnsight asks the hub how it spells this repository's id
    tokenizer = AutoTokenizer.from_pretrained(path)
    far = TransformersModel(path, task="text-generation", tokenizer=tokenizer)
    near = TransformersModel(path, task="text-generation", dispatch=True)
    mine = {name: found for name, found in globals().items() if inspect.isfunction(found)}
    no_sections = {"made", "normed", "outcome", "main"}
    found = {
        name: {"remote": outcome(section, far, True), "local": outcome(section, near, False)}
        for name, section in mine.items()
        if name not in no_sections and section.__module__ == __name__
    }
    assert not far.dispatched, "the client has loaded weights"
    torch.save(found, to)


if __name__ == "__main__":
    main(*sys.argv[1:])
