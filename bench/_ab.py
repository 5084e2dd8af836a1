import sys, time, torch
t0=time.time()
from bench import attention_decode as B
from tkernels.attention._tiles import DecodeTiles as T
import tkernels.attention._ab_decode_v1 as v1, tkernels.attention.decode as v2
V1={}
def tiles(p,s,r,pdl,w=4,bn=64): return T(block_n=bn,programs_per_sm=p,num_warps=w,num_stages=s,maxnreg=r,pdl=pdl)
class Main:  # main kernel only
    def __getitem__(s,g): return lambda *a,**k: None
def main_only(mod):
    def f(*a):
        c=mod._combine_kernel; mod._combine_kernel=Main()
        try: mod.decode(*a)
        finally: mod._combine_kernel=c
    return f
S={
 'v1 p4s2':(tiles(4,2,128,False),v1.decode),
 'v1 pdl':(tiles(4,2,128,True),v1.decode),
 'v1 p3s3':(tiles(3,3,168,True),v1.decode),
 'v1 w2p6':(tiles(6,2,None,True,2),v1.decode),
 'v2 p2s3pdl':(tiles(2,3,None,True),v2.decode),
 'v2 p3s2pdl':(tiles(3,2,168,True),v2.decode),
 'v2 p2s4pdl':(tiles(2,4,None,True),v2.decode),
}
rows=[(1,1024),(1,8192),(16,1024),(32,4096),(256,2048)]
PS={f"{bm}x{bn}w{w}s{s}":(bm,bn,w,s) for bm,bn,w,s in ((128,64,8,3),(128,64,8,2),(128,64,8,4),(128,128,8,2),(128,128,8,3),(64,64,4,3),(64,128,4,2))}
if sys.argv[1:2]==['--warm']:
    k=int(sys.argv[2])
    from bench import attention_prefill as P
    from tkernels.attention._tiles import PrefillTiles as PT
    names=list(S)
    if k<len(names):
        for b in (1,32,256):
            batch=B.make_batch([1024]*b,[1]*b,rotate=0)
            B.ours(batch,*S[names[k]])(0)
            if b==32 and 'v2 p2s3' in names[k]: B.ours(batch)(0)
    elif k-len(names)<len(PS):
        bm,bn,w,st=list(PS.values())[k-len(names)]
        batch=B.make_batch([1024],[1024],rotate=0)
        try: P.ours(batch,PT(block_m=bm,block_n=bn,num_warps=w,num_stages=st))(0)
        except Exception as e: print(k,str(e)[:100])
    elif k==len(names)+len(PS):
        for b in (1,32,256): B.ours(B.make_batch([1024]*b,[1]*b,rotate=0))(0)
    else:
        P.peers(8,1024)['flex'](0)
    torch.cuda.synchronize(); sys.exit()
if __name__=='__main__':
    res=[]
    for b,n in rows:
        try:
            batch_checked=B.run_case(f"{b} x {n}",[n]*b,peer=(b,n),sweep=S); res.append(batch_checked)
        except Exception as e: print(b,n,'FAIL',type(e).__name__,str(e)[:300],flush=True)
        if (b,n) in ((1,1024),(32,4096),(256,2048)) and res:
            batch=B.make_batch([n]*b,[1]*b)
            gs={}
            for k in ('v1 p4s2','v2 p2s3pdl'):
                t,d=S[k]; t=T(**{**t.__dict__,'pdl':False}); mod=v1 if k[:2]=='v1' else v2
                gs[k+' main']=B.capture(B.ours(batch,t,main_only(mod)),20)
            print('   main only',{k:round(v,1) for k,v in B.interleaved(gs,20).items()},flush=True)
        print('t',round(time.time()-t0,1),flush=True)
    B.save('ab1',res)
    from bench import attention_prefill as P
    from tkernels.attention._tiles import PrefillTiles as PT
    sw={}
    for k,(bm,bn,w,st) in PS.items(): sw[k]=PT(block_m=bm,block_n=bn,num_warps=w,num_stages=st)
    pres=[]
    for b,n in ((8,1024),(4,4096),(1,16384)):
        try: pres.append(P.run_case(f"{b} x {n}",[n]*b,[n]*b,P.peers(b,n) if b<9 else {},sw))
        except Exception as e: print('prefill FAIL',type(e).__name__,str(e)[:400],flush=True)
        print('t',round(time.time()-t0,1),flush=True)
    if 0: P.run_case("page 128 4 x 4096",[4096]*4,[4096]*4,{},dict(list(sw.items())[:3]),page_size=128)
    B.save('ab_prefill',pres)
