# Trains on pairs of answers with TRL, and prints the losses of each case: trl.py FOLDER CASES
#
# DPO runs in TRL's own trainer. For ORPO and SimPO this script calls the loss functions of TRL's trainers on each pair,
# because those trainers divide a term of ORPO by the tokens of the micro-batch, and tokenize in a way of their own.
import json, sys, types
import peft, torch, transformers
from datasets import load_dataset
from trl import DPOConfig, DPOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

STEPS, PAIRS = 100, 4
transformers.utils.logging.set_verbosity_error()
torch.set_num_threads(1)
gpt2 = dict(vocab_size=276, n_positions=96, n_embd=32, n_layer=2, n_head=2, initializer_range=0.1,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
llama = dict(vocab_size=276, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=96, initializer_range=0.1)


def base(name, folder):
    torch.manual_seed(3)
    if name == 'GPT-2':
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt2))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama))
    model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).float()


def trainer(model, folder, **options):
    config = DPOConfig(
        output_dir=f'{folder}/trl', per_device_train_batch_size=PAIRS, max_steps=STEPS, logging_steps=1, learning_rate=1e-3,
        lr_scheduler_type='constant', optim='adamw_torch', adam_epsilon=1e-6, max_grad_norm=0.5, use_cpu=True, bf16=False,
        save_strategy='no', train_sampling_strategy='sequential', gradient_checkpointing=False, disable_tqdm=True, **options)
    data = load_dataset('json', data_files=f'{folder}/data.jsonl', split='train', cache_dir=f'{folder}/cache')
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return DPOTrainer(model, args=config, train_dataset=data, processing_class=tokenizer)


def dpo(model, folder, **options):
    run = trainer(model, folder, **options)
    run.train()
    return [entry['loss'] for entry in run.state.log_history if 'loss' in entry]


def answers(model, pair):
    """Returns the mean log-probability of both answers, and the loss of all tokens of the chosen text."""
    means, loss = [], None
    for answer in ['chosen_ids', 'rejected_ids']:
        ids = torch.tensor([pair['prompt_ids'] + pair[answer]])
        logits, labels = model(ids).logits, ids.clone()
        if loss is None: loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
        labels[0, :len(pair['prompt_ids'])] = -100
        means.append(ORPOTrainer.get_batch_logps(logits, labels, average_log_prob=True))
    return means, loss


def orpo(model, pair, beta):
    means, loss = answers(model, pair)
    self = types.SimpleNamespace(beta=beta, accelerator=types.SimpleNamespace(device='cpu'))
    return loss - ORPOTrainer.odds_ratio_loss(self, *means)[0].mean()


def simpo(model, pair, beta, gamma):
    means, _ = answers(model, pair)
    self = types.SimpleNamespace(beta=beta, simpo_gamma=gamma, alpha=0.0, label_smoothing=0.0, loss_type='simpo',
                                 accelerator=types.SimpleNamespace(device='cpu'))
    return CPOTrainer.cpo_loss(self, *means)[0].mean()


def by_hand(model, folder, loss, **options):
    data = trainer(model, folder).train_dataset
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.0), []
    for step in range(STEPS):
        pairs = [data[(step * PAIRS + i) % len(data)] for i in range(PAIRS)]
        mean = sum(loss(model, pair, **options) for pair in pairs) / PAIRS
        mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step(); optimizer.zero_grad()
        losses.append(mean.item())
    return losses


for index, (name, is_lora, call) in enumerate(json.loads(CASES)):
    model = base(name, f'{FOLDER}/base-{index}')
    if is_lora:
        initial = f'{FOLDER}/initial-{index}'
        peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules='all-linear')).save_pretrained(initial)
        model = base(name, f'{FOLDER}/base-{index}')
        model = peft.PeftModel.from_pretrained(model, initial, is_trainable=True)
    print('losses', json.dumps(eval(call)), flush=True)
