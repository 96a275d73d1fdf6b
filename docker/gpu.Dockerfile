# ppldm on NVIDIA GPUs:  docker build -f docker/gpu.Dockerfile --build-arg CUDA=12.6 -t ppldm:gpu .
# To run it: docker run --gpus all --shm-size=2g ppldm:gpu env. The driver and NVIDIA's container toolkit are the host's; the
# CUDA libraries come with Paddle. CUDA is one of those that `bash run_scripts/setup.sh --help` names.
FROM debian:bookworm-slim
ARG CUDA=12.6
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates libgomp1 python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENV PPLDM_VENV=/opt/ppldm PIP_NO_CACHE_DIR=1
WORKDIR /ppldm
COPY . /ppldm
RUN bash run_scripts/setup.sh --device gpu --cuda "$CUDA"
ENV PATH=/opt/ppldm/bin:$PATH
WORKDIR /work
ENTRYPOINT ["ppldm"]
CMD ["--help"]
