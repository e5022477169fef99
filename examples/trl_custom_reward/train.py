"""Train on sums with the team's rewards: python train.py [--model NAME] [--steps 2]. By default a tiny random model."""

import argparse
import tempfile

from datasets import Dataset
from rewards import correct, overlong
from trl import GRPOConfig, GRPOTrainer

from rlcanary.tiny_models import tiny_llama, tiny_tokenizer

LIMIT = 16


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    rows = [{"prompt": f"t{one} t{other}", "answer": str(one + other)} for one in range(3, 7) for other in range(3, 7)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=arguments.model or tiny_llama(),
            processing_class=None if arguments.model else tiny_tokenizer(),
            reward_funcs=[correct, overlong(LIMIT, buffer=8)],
            train_dataset=Dataset.from_list(rows),
            args=GRPOConfig(
                output_dir=folder,
                max_steps=arguments.steps,
                max_completion_length=LIMIT,
                num_generations=4,
                per_device_train_batch_size=8,
                use_cpu=not arguments.model,
                bf16=bool(arguments.model),
                report_to=[],
                disable_tqdm=True,
                logging_steps=1,
            ),
        )
        trainer.train()
    print(f"trained {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
