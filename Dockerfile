# Understudy with everything for one machine, built by `make image`. docs/running.md says how to run it, and which rights its
# sandboxes need.
ARG BASE=debian:bookworm-slim
FROM ${BASE}

RUN apt-get update \
  && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    bubblewrap ca-certificates git openssh-client python3-venv \
  && rm -rf /var/lib/apt/lists/*

# The build of torch: cpu, or that of a CUDA release, such as cu130, from PyTorch's index of packages. If empty, torch is
# taken from UV_FIND_LINKS (a page of wheels) or from the package index.
ARG TORCH_BACKEND=cpu
ARG UV_FIND_LINKS
COPY pyproject.toml README.md LICENSE /build/
COPY requirements/ /build/requirements/
COPY src/ /build/src/
# uv takes versions and hashes from the lock files, which also hold packages that only the tests need: those are not
# installed. uv itself is removed again.
RUN cd /build \
  && python3 -m venv /opt/understudy && python3 -m venv uv \
  && awk '/^[a-z]/ { keep = /^uv==/ } keep' requirements/train.txt >uv.txt \
  && uv/bin/pip install -qq --no-cache-dir --require-hashes --no-deps -r uv.txt \
  && VIRTUAL_ENV=/opt/understudy uv/bin/uv pip install --quiet --no-cache --compile-bytecode ${TORCH_BACKEND:+--torch-backend=$TORCH_BACKEND} \
    --build-constraints requirements/train.txt --constraints requirements/train.txt --constraints requirements/node.txt \
    '.[hf,node,otel,postgres,redact,train]' \
  && rm -rf /build

ENV PATH=/opt/understudy/bin:$PATH UNDERSTUDY_CACHE=/var/cache/understudy
RUN useradd --create-home understudy && install -d -o understudy -g understudy /var/cache/understudy /work
USER understudy
RUN understudy setup
WORKDIR /work
ENTRYPOINT ["understudy"]
CMD ["--help"]
