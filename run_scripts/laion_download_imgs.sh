#!/usr/bin/env bash
[ -n "$BASH_VERSION" ] || exec bash "$0" "$@"
# Download the pictures of one part of LAION metadata, or of all:  bash run_scripts/laion_download_imgs.sh PART_ID
# PART_ID is the number of METADATA_DIR/part_N.parquet, as `ppldm filter` writes them; 0 means all. The same command
# again goes on where it stopped. Flags after the number win (`ppldm download --help`).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$([ -x "$root/.venv/bin/python" ] && echo "$root/.venv/bin/python" || echo python)}

METADATA_DIR=${METADATA_DIR:-laion_2b_en_filtered}
SAVE_DIR=${SAVE_DIR:-laion_2b_en_images}
OUTPUT_FORMAT=${OUTPUT_FORMAT:-files} # files, webdataset or parquet
IMAGE_SIZE=${IMAGE_SIZE:-512}
TIMEOUT=${TIMEOUT:-10}                # seconds of silence after which a URL is given up
PROCESSES=${PROCESSES:-16}            # shards at once
THREADS=${THREADS:-64}                # URLs at once for each shard

if [[ ! ${1:-} =~ ^[0-9]+$ ]]; then
    echo "error: which part? bash $0 PART_ID [flags of ppldm download], 0 for all" >&2
    exit 2
fi
part_id=$1
shift
exec env PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" -m ppldm download "$METADATA_DIR" --out "$SAVE_DIR" \
    --part-id "$part_id" --output-format "$OUTPUT_FORMAT" --image-size "$IMAGE_SIZE" --timeout "$TIMEOUT" \
    --processes-count "$PROCESSES" --thread-count "$THREADS" "$@"
