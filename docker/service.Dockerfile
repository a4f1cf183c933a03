# API and planner: no torch, no engine.
FROM python:3.12-slim AS build
WORKDIR /src
RUN pip install --no-cache-dir uv==0.13.8
COPY requirements/server.txt requirements/server.txt
RUN uv pip install --system --compile-bytecode --require-hashes -r requirements/server.txt
COPY . .
RUN uv pip install --system --compile-bytecode --no-deps ./client .

FROM python:3.12-slim
COPY --from=build /usr/local/lib/python3.12/site-packages /usr/local/lib/python3.12/site-packages
COPY --from=build /usr/local/bin/batchweave /usr/local/bin/batchweave
# A new volume takes its owner from the image; the worker's image uses the same user id.
RUN useradd --uid 10001 --create-home batchweave && install -d -o batchweave /objects
USER batchweave
WORKDIR /home/batchweave
# Compile the planner and the scan to machine code in the user's cache, so that no start waits for it.
RUN python3 -m engine_ext.warm_up
ENTRYPOINT ["batchweave"]
CMD ["api", "--host", "0.0.0.0"]
