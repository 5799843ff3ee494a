"""Agents whose requests have images: contexts by what was seen, and turns that train as they were sampled."""

import base64
import io

import pytest
import torch

from tests.kit.vision import picture
from tests.kit.vision_runs import own_logprobs, trained, vision_trainer

pytest.importorskip("openai")
ONE = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}


def shown(image, text, **more):
    file = io.BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    # Without a `detail` it is a text, as some clients write it.
    part = {"type": "image_url", "image_url": {"url": url, **more} if more else url}
    return {"role": "user", "content": [{"type": "text", "text": text}, part]}


async def ask(client, messages):
    answer = await client.chat.completions.create(model="policy", messages=messages)
    return {"role": "assistant", "content": answer.choices[0].message.content}


def run(folder, agent, family="LLaVA", **options):
    trainer = trained(vision_trainer(folder, family, None, agent=agent, **ONE, **options))
    data = trainer.data
    gaps = data["sampling_per_token_logps"] - data["old_per_token_logps"]
    assert float(gaps[data["loss_mask"]].abs().max()) < 1e-5
    with torch.no_grad():
        found = trainer._forward.policy(trainer.model.eval(), data)[0]
    assert float((found - own_logprobs(trainer))[data["loss_mask"]].abs().max()) < 1e-5
    return trainer.played.episodes


@pytest.mark.parametrize("family", ["LLaVA", pytest.param("Qwen2.5-VL", marks=pytest.mark.long)])
def test_a_conversation_with_images_is_one_row(family, tmp_path):
    seen = []

    async def agent(client, row):
        messages = [shown(picture(row["task"]), "look: ")]
        for turn in range(2):
            messages += [await ask(client, messages), shown(picture(turn), "now ")]
        await ask(client, messages)
        return 0.5

    def judge(prompts, completions, **columns):
        seen.extend(block["image"] for each in prompts for m in each for block in m["content"]
                    if isinstance(m["content"], list) and block["type"] == "image")  # fmt: skip
        return [0.0] * len(prompts)

    episodes = run(tmp_path, agent, family, turn_reward_funcs=[judge])
    assert [[len(c.images) for c in e.contexts] for e in episodes] == [[3]] * 8
    assert [e.num_turns for e in episodes] == [3] * 8
    assert [image.size for image in seen] == [(16, 16)] * 8 * (1 + 2 + 3)


def test_another_image_of_the_same_tokens_opens_a_context(tmp_path):
    async def agent(client, row):
        first, other = (shown(picture(n), "look: ", detail="low") for n in (1, 2))
        said = await ask(client, [first])
        await ask(client, [other, said, {"role": "user", "content": "go on"}])
        return 1.0

    episodes = run(tmp_path, agent)
    assert [[len(c.images) for c in e.contexts] for e in episodes] == [[1, 1]] * 8
    assert all(e.images != e.more[0].images for e in episodes)
    # The rows begin with equal tokens.
    assert all(e.prompt_ids == e.more[0].prompt_ids[: len(e.prompt_ids)] for e in episodes)
