# What the scripts share.

# readme_command N: the lines of the README's N-th `sh` block, so that it cannot go stale.
readme_command() { awk -v want="$1" '/^```sh$/ {block++; inside=1; next} /^```$/ {inside=0} inside && block == want' README.md; }
