#!/bin/sh
# GRPO on verl 0.9.1: Claude Code's rollouts on TASKS, sampled by verl's own vLLM, train MODEL.
#
#   TASKS=tasks.jsonl DATA=data/rl RUNS=runs/verl MODEL=Qwen/Qwen3-8B sh recipes/verl/train.sh [verl options]
#
# What it needs, and where TASKS and DATA are from, is in docs/clusters.md. `sh train.sh --cfg job` prints the whole
# configuration and needs no GPU.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
: "${TASKS:?the file of the tasks}" "${DATA:?the directory that understudy export verl --form rl wrote}"
export TASKS RUNS="${RUNS:-runs/verl}" TOOL_FORMAT="${TOOL_FORMAT:-hermes}"
MODEL=${MODEL:-Qwen/Qwen3-8B}
GPUS=${GPUS:-8} NODES=${NODES:-1}
PROMPT=${PROMPT:-24576} RESPONSE=${RESPONSE:-40960}

# A whole batch of rollouts is one update: its groups are measured by weights of one version.
exec "${PYTHON:-python3}" -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  algorithm.norm_adv_by_std_in_grpo=False \
  algorithm.use_kl_in_reward=False \
  algorithm.rollout_correction.rollout_is=token \
  algorithm.rollout_correction.rollout_is_threshold=2.0 \
  data.train_files="$DATA/train.parquet" \
  data.val_files="$DATA/${VALIDATION:-test.parquet}" \
  data.prompt_key=prompt \
  data.train_batch_size="${TASKS_A_STEP:-16}" \
  data.max_prompt_length="$PROMPT" \
  data.max_response_length="$RESPONSE" \
  data.filter_overlong_prompts=False \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.actor.optim.lr="${LEARNING_RATE:-1e-6}" \
  actor_rollout_ref.actor.ppo_mini_batch_size="${TASKS_A_STEP:-16}" \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$((PROMPT + RESPONSE))" \
  actor_rollout_ref.actor.clip_ratio_low=0.2 \
  actor_rollout_ref.actor.clip_ratio_high=0.28 \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.actor.fsdp_config.param_offload=True \
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n="${SAMPLES:-8}" \
  actor_rollout_ref.rollout.temperature=1.0 \
  actor_rollout_ref.rollout.calculate_log_probs=True \
  actor_rollout_ref.rollout.logprobs_mode=processed_logprobs \
  actor_rollout_ref.rollout.max_model_len="$((PROMPT + RESPONSE))" \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.tensor_model_parallel_size="${TENSOR_PARALLEL:-2}" \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$((PROMPT + RESPONSE))" \
  actor_rollout_ref.rollout.agent.default_agent_loop=understudy \
  actor_rollout_ref.rollout.agent.agent_loop_config_path="$here/agent_loop.yaml" \
  actor_rollout_ref.rollout.agent.num_workers="${WORKERS:-8}" \
  trainer.n_gpus_per_node="$GPUS" \
  trainer.nnodes="$NODES" \
  trainer.total_epochs="${EPOCHS:-5}" \
  trainer.save_freq=10 \
  trainer.test_freq=10 \
  trainer.val_before_train=True \
  trainer.project_name=understudy \
  trainer.experiment_name="${NAME:-grpo}" \
  'trainer.logger=["console","tensorboard"]' \
  "$@"
