#!/usr/bin/env bash
# From nothing to pictures: the environment, demo data, an autoencoder, a latent diffusion model, a grid of samples.
set -euo pipefail
# shellcheck source=run_scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    cat <<'END'
usage: bash run_scripts/quickstart.sh [--steps N] [--autoencoder-steps N] [--out DIR] [--dry-run] [--help]

Makes .venv, draws captioned pictures, trains a small autoencoder and a small text-to-image model on them, and draws
what the model makes of a list of prompts. On 2 cores it takes about 15 minutes after the installation.
Stopped at any point, the same command goes on from what is finished.

  --steps N              updates of the text-to-image model (1400 without it)
  --autoencoder-steps N  updates of the autoencoder (2000 without it)
  --out DIR              where data, models and pictures go (quickstart/ in the repository without it)
  --dry-run              print the commands and run none
  --help                 this text

environment: PYTHON (the interpreter, 3.10 to 3.12), PPLDM_VENV (the virtual environment, .venv without it)
END
}

steps=1400
autoencoder_steps=2000
out=$ROOT/quickstart
dry_run=no
while (($#)); do
    case $1 in
        --steps | --autoencoder-steps | --out)
            (($# >= 2)) || die "$1 needs a value (--help explains the flags)"
            case $1 in
                --steps) steps=$2 ;;
                --autoencoder-steps) autoencoder_steps=$2 ;;
                --out) out=$2 ;;
            esac
            shift
            ;;
        --steps=*) steps=${1#*=} ;;
        --autoencoder-steps=*) autoencoder_steps=${1#*=} ;;
        --out=*) out=${1#*=} ;;
        --dry-run) dry_run=yes ;;
        -h | --help)
            usage
            exit
            ;;
        *) die "unknown flag $1; known: --steps N, --autoencoder-steps N, --out DIR, --dry-run, --help" ;;
    esac
    shift
done
[[ $steps =~ ^[1-9][0-9]*$ ]] || die "--steps $steps: a whole number of at least 1 is needed"
[[ $autoencoder_steps =~ ^[1-9][0-9]*$ ]] ||
    die "--autoencoder-steps $autoencoder_steps: a whole number of at least 1 is needed"
[[ -n $out ]] || die "--out needs the name of a folder"
[[ $out == /* ]] || out=$PWD/$out

# On a CPU small networks gain nothing from a second thread, but two processes train twice as fast as one; a GPU takes
# one process. The global batch, and with it the result, is the same for both.
decide_device
python=$VENV/bin/python
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # nproc believes these, and they say nothing of processes
processes=$((cores > 1 ? 2 : 1))
[[ $DEVICE == cpu ]] || processes=1
train=("$python" -u)
((processes == 1)) || train+=(-m ppldm.training.distributed.launch --nproc_per_node "$processes" --log_dir "$out/log")

# The five stages. Each resumes by itself when the same command runs again.
data_command=(
    "$python" -m ppldm demo-data
    --out "$out/data"
    --subset quickstart
    --size 48
)
# Without captions, the autoencoder may see the pictures that the text-to-image model never does.
autoencoder_command=(
    "${train[@]}" examples/train_autoencoder.py
    --output_dir "$out/autoencoder"
    --file_list "$out/data/autoencoder.filelist.list"
    --vae_config_file examples/config/vae_tiny.json
    --resolution 48
    --crop_fraction 1.0
    --random_crop false
    --reconstruction_loss l1_mse
    --kl_weight 0.02
    --per_device_train_batch_size $((4 / processes))
    --gradient_accumulation_steps 1
    --max_steps "$autoencoder_steps"
    --learning_rate 2e-3
    --lr_scheduler_type cosine
    --warmup_steps 100
    --adam_beta2 0.99
    --weight_decay 1e-4
    --max_grad_norm 1.0
    --logging_steps 50
    --image_logging_steps 500
    --save_steps 100
    --save_total_limit 2
    --dataloader_num_workers 0
)
diffusion_command=(
    "${train[@]}" examples/train_txt2img_laion400m_trainer.py
    --do_train
    --output_dir "$out/diffusion"
    --file_list "$out/data/demo.filelist.list"
    --vae_name_or_path "$out/autoencoder/vae"
    --text_encoder_config_file examples/config/ldmbert_tiny.json
    --unet_config_file examples/config/unet_tiny.json
    --tokenizer_name "$out/data/tokenizer"
    --model_max_length 12
    --resolution 48
    --crop_fraction 1.0
    --random_crop false
    --prediction_type v_prediction
    --use_ema
    --ema_decay 0.99
    --per_device_train_batch_size $((16 / processes))
    --gradient_accumulation_steps 1
    --max_steps "$steps"
    --learning_rate 1e-3
    --lr_scheduler_type cosine
    --warmup_steps 100
    --adam_beta2 0.99
    --weight_decay 0.01
    --max_grad_norm 1.0
    --logging_steps 20
    --image_logging_steps 500
    --validation_prompts "$out/data/prompts.txt"
    --num_inference_steps 20
    --save_steps 100
    --save_total_limit 2
    --seed 23
    --dataloader_num_workers 0
)
generate_command=(
    "$python" -m ppldm generate
    --model "$out/diffusion/pipeline"
    --prompts "$out/data/prompts.txt"
    --out "$out/pictures"
    --num-samples 4
    --guidance-scale 2
    --num-inference-steps 30
)
curve_command=(
    "$python" -m ppldm plot-loss "$out/diffusion"
    --out "$out/pictures/loss.png"
)

# stage NUMBER NAME TITLE COMMAND...: run a stage, or skip it where it is finished with this very command.
# A stage that runs makes those after it run again; one whose command has changed starts anew, and so do those after it.
names=([1]=data [2]=autoencoder [3]=diffusion [4]=pictures [5]=curve)
total_stages=${#names[@]}
report=()
stage() {
    local number=$1 title=$2 marker=$out/.done/$1-${names[$1]} started=$SECONDS seconds checksum
    shift 2
    if [[ $dry_run == yes ]]; then
        printf '# %s\n' "$title"
        printf '%q ' "$@"
        printf '\n'
        return
    fi
    checksum=$(printf '%s\n' "$@" | sha256sum | cut -d' ' -f1)
    if [[ -f $marker ]]; then
        read -r seconds checksum_done <"$marker"
        if [[ $checksum_done == "$checksum" ]]; then
            say "[$number/$total_stages] $title: done before"
            report+=("$(printf '%6s s  %s (before)' "$seconds" "$title")")
            return
        fi
    fi
    if [[ -f $marker.begun && $(<"$marker.begun") != "$checksum" ]]; then
        say "stage $number (${names[$number]}) was begun with another command: it starts anew"
        remove_results_from "$number"
    fi
    remove_markers_from "$number"
    echo "$checksum" >"$marker.begun"
    say "[$number/$total_stages] $title"
    run_stoppable "$@" ||
        die "stage $number (${names[$number]}) failed, see above; the same command again goes on from here"
    seconds=$((SECONDS - started))
    echo "$seconds $checksum" >"$marker.tmp"
    mv "$marker.tmp" "$marker"
    report+=("$(printf '%6s s  %s' "$seconds" "$title")")
}

remove_markers_from() {
    local number
    for ((number = $1; number <= total_stages; number++)); do
        rm -f "$out/.done/$number-${names[$number]}"
    done
}

remove_results_from() {
    local number
    for ((number = $1; number <= total_stages; number++)); do
        rm -rf "${out:?}/${names[$number]}" "$out/.done/$number-${names[$number]}.begun"
    done
}

if [[ $dry_run == yes ]]; then
    show_environment_commands
else
    make_venv
    mkdir -p "$out/.done" 2>/dev/null || die "cannot write to $out; choose another folder with --out"
fi
cd "$ROOT"
stage 1 "drawing captioned pictures (seconds)" "${data_command[@]}"
stage 2 "training the autoencoder (about 4 minutes)" "${autoencoder_command[@]}"
stage 3 "training the text-to-image model, $steps updates (about 6 minutes)" "${diffusion_command[@]}"
stage 4 "drawing pictures for the prompts (under a minute)" "${generate_command[@]}"
stage 5 "drawing the loss curve (seconds)" "${curve_command[@]}"
if [[ $dry_run == no ]]; then
    printf '%s\n' "${report[@]}" >&2
    say "the pictures: $out/pictures/grid.png (every prompt), $out/pictures/loss.png (the loss curve)"
    say "the runs' curves and samples: $VENV/bin/visualdl --logdir $out --language en"
fi
