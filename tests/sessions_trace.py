import json,random
S,T,B=35,4,16
rng=random.Random(1)
t=0
with open("load.jsonl","w") as f:
    for rnd in range(4):
        order=list(range(S))
        for turn in range(T):
            # closed loop: order mostly preserved
            for s in order:
                ids=[((rnd*S+s)*T*B)+i for i in range((turn)*B + 15)]
                f.write(json.dumps({"timestamp":t,"hash_ids":ids,"input_length":len(ids)*32,"output_length":32})+"\n")
                t+=100
