"""What spark-submit runs:  spark-submit --master yarn run_scripts/spark_ppldm.py filter --input ... --output ..."""

from ppldm.cli.main import main

main()
