from lolcats.cli import main

main()
