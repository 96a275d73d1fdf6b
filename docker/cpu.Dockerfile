# ppldm on CPUs:  docker build -f docker/cpu.Dockerfile -t ppldm .
FROM debian:bookworm-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates libgomp1 python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PPLDM_VENV=/opt/ppldm PIP_NO_CACHE_DIR=1
WORKDIR /ppldm
COPY . /ppldm
RUN bash run_scripts/setup.sh --device cpu
ENV PATH=/opt/ppldm/bin:$PATH
WORKDIR /work
ENTRYPOINT ["ppldm"]
CMD ["--help"]
