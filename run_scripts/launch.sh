# Sourced by the run_*.sh scripts: the published settings, each overridable by the environment variable of its name.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$([ -x "$root/.venv/bin/python" ] && echo "$root/.venv/bin/python" || echo python)}

BATCH_SIZE=${BATCH_SIZE:-6}                                    # per device
GRADIENT_ACCUMULATION_STEPS=${GRADIENT_ACCUMULATION_STEPS:-10}
LEARNING_RATE=${LEARNING_RATE:-4.6875e-5}
WEIGHT_DECAY=${WEIGHT_DECAY:-0.02}
MAX_STEPS=${MAX_STEPS:-1000000000}
LR_SCHEDULER=${LR_SCHEDULER:-constant}
WARMUP_STEPS=${WARMUP_STEPS:-0}
LOGGING_STEPS=${LOGGING_STEPS:-50}
SAVE_STEPS=${SAVE_STEPS:-5000}
SEED=${SEED:-23}
NUM_WORKERS=${NUM_WORKERS:-6}                                  # data loading processes per device
MODEL=${MODEL:-CompVis/ldm_laion400M_pretrain}
FILE_LIST=${FILE_LIST:-$root/data/filelist/train.filelist.list}
NUM_INFERENCE_STEPS=${NUM_INFERENCE_STEPS:-200}
MODEL_MAX_LENGTH=${MODEL_MAX_LENGTH:-77}
TOKENIZER=${TOKENIZER:-bert-base-uncased}

trainer_command=("$root/examples/train_txt2img_laion400m_trainer.py"
    --do_train
    --output_dir "${OUTPUT_DIR:-./laion400m_pretrain_output_trainer}"
    --per_device_train_batch_size "$BATCH_SIZE"
    --gradient_accumulation_steps "$GRADIENT_ACCUMULATION_STEPS"
    --learning_rate "$LEARNING_RATE"
    --weight_decay "$WEIGHT_DECAY"
    --max_steps "$MAX_STEPS"
    --lr_scheduler_type "$LR_SCHEDULER"
    --warmup_steps "$WARMUP_STEPS"
    --logging_steps "$LOGGING_STEPS"
    --save_steps "$SAVE_STEPS"
    --save_total_limit "${SAVE_TOTAL_LIMIT:-50}"
    --seed "$SEED"
    --dataloader_num_workers "$NUM_WORKERS"
    --model_name_or_path "$MODEL"
    --file_list "$FILE_LIST"
    --num_inference_steps "$NUM_INFERENCE_STEPS"
    --model_max_length "$MODEL_MAX_LENGTH"
    --tokenizer_name "$TOKENIZER")

no_trainer_command=("$root/examples/train_txt2img_laion400m_no_trainer.py"
    --output_dir "${OUTPUT_DIR:-./laion400m_pretrain_output_no_trainer}"
    --train_batch_size "$BATCH_SIZE"
    --gradient_accumulation_steps "$GRADIENT_ACCUMULATION_STEPS"
    --learning_rate "$LEARNING_RATE"
    --adam_weight_decay "$WEIGHT_DECAY"
    --max_train_steps "$MAX_STEPS"
    --lr_scheduler "$LR_SCHEDULER"
    --lr_warmup_steps "$WARMUP_STEPS"
    --logging_steps "$LOGGING_STEPS"
    --save_steps "$SAVE_STEPS"
    --seed "$SEED"
    --num_workers "$NUM_WORKERS"
    --pretrained_model_name_or_path "$MODEL"
    --file_list "$FILE_LIST"
    --num_inference_steps "$NUM_INFERENCE_STEPS"
    --model_max_length "$MODEL_MAX_LENGTH"
    --tokenizer_name "$TOKENIZER")

# One process for each device that the installed Paddle is made for (DEVICES="0,1,…", also GPUS; by default all that are
# visible); without any, NPROC CPU processes (2).
# More machines: the same command on each, with IPS="ip1,ip2", or with MASTER=ip1:port NNODES=2 (and NODE_RANK=0 and 1,
# where their order matters). docs/training.md, "Ranks", says what the launcher does.
distributed_launch() {
    local words devices
    words=$("$PYTHON" -m ppldm.utils.machine.devices --devices "${DEVICES:-${GPUS:-}}" --processes "${NPROC:-}")
    read -ra devices <<<"$words"
    [ -z "${IPS:-}" ] || devices+=(--ips "$IPS")
    [ -z "${MASTER:-}" ] || devices+=(--master "$MASTER" --nnodes "${NNODES:-1}")
    [ -z "${NODE_RANK:-}" ] || devices+=(--rank "$NODE_RANK")
    exec "$PYTHON" -u -m ppldm.training.distributed.launch "${devices[@]}" --log_dir "${LAUNCH_LOG_DIR:-log}" "$@"
}
