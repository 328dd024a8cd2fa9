# attack: be loaded before everything else
# defence: the interpreter is isolated and looks for no such file
# expect: fail
# succeeds-without: isolated-interpreter
# uses: zeros

# ==== file: sitecustomize.py
import os

os._exit(0)
# ==== file: usercustomize.py
import os

os._exit(0)
# ==== file: solution.pth
import os; os._exit(0)
