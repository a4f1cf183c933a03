# Worker: SGLang and one engine on the GPUs that the container is given.
# With BASE=ubuntu:24.04 it runs on a CPU only.
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM $BASE
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv python3-dev \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/batchweave PATH=/opt/batchweave/bin:$PATH
RUN python3 -m venv $VIRTUAL_ENV && pip install --no-cache-dir uv==0.13.8
WORKDIR /src
# engine, or fleet: the same with Ray
ARG REQUIREMENTS=engine
COPY requirements/$REQUIREMENTS.txt requirements/$REQUIREMENTS.txt
RUN uv pip install --compile-bytecode --require-hashes -r requirements/$REQUIREMENTS.txt
COPY . .
RUN uv pip install --compile-bytecode --no-deps ./client .
# A new volume takes its owner from the image; the service's image uses the same user id.
RUN useradd --uid 10001 --create-home batchweave && install -d -o batchweave /objects
USER batchweave
WORKDIR /home/batchweave
# Compile the planner and the scan to machine code in the user's cache, so that no start waits for it.
RUN python3 -m engine_ext.warm_up
# Compute capabilities of the GPUs for which kernels are compiled here, not at a worker's first start; none on a CPU.
ARG GPUS=9.0
RUN if command -v nvcc; then for gpu in $GPUS; do python3 -m engine_ext.plugin.build_kernels "$gpu" || exit 1; done; fi
RUN mkdir -p .cache/huggingface
ENTRYPOINT ["batchweave"]
CMD ["worker"]
